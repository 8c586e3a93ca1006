"""The examples of the guides that make a lab run as they stand there."""

import pytest

from roadtrain.lab import cpus_available, network_available
from tests.support.guide_pages import LAB, PAGES, START, name_of, run_example

WHY = network_available() or cpus_available()
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize(
    "page",
    [
        # the guide's example makes the same run as the start page's
        pytest.param(page, marks=pytest.mark.exhaustive if page in START else (), id=name_of(page))
        for page in PAGES
        if name_of(page) in LAB
    ],
)
def test_the_example_runs_and_prints_what_it_says(page, tmp_path):
    run_example(page, tmp_path, timeout_s=400)
