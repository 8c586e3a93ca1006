"""The examples of the guides that create a lab run as written."""

import pytest

from roadtrain.lab import cpus_available, network_available
from tests.support.guide_pages import LAB, PAGES, START, name_of, run_example

WHY = network_available() or cpus_available()
SLOW = [page for page in PAGES if page in START or name_of(page) == "guides/two-clusters"]
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize(
    "page",
    [
        # tests/stages/lab/test_crosscluster.py trains on two clusters
        pytest.param(page, marks=pytest.mark.exhaustive if page in SLOW else (), id=name_of(page))
        for page in PAGES
        if name_of(page) in LAB
    ],
)
def test_the_example_runs_and_prints_the_documented_output(page, tmp_path):
    run_example(page, tmp_path, timeout_s=400)
