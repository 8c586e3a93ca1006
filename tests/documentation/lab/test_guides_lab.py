"""The examples of the guides and the folders in examples/ that create a lab run as written."""

import pytest

from roadtrain.lab import cpus_available, network_available
from tests.support.guide_pages import FOLDERS, LAB, PAGES, name_of, run_example

WHY = network_available() or cpus_available()
pytestmark = [pytest.mark.lab, pytest.mark.exhaustive, pytest.mark.timeout(420)]


@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, *FOLDERS] if name_of(page) in LAB], ids=name_of
)
def test_the_example_runs_and_prints_the_documented_output(page, tmp_path):
    run_example(page, tmp_path, timeout_s=400)
