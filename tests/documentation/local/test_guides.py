"""The examples of the guides and start pages run as written and print the documented output."""

import pytest

from tests.support.guide_pages import LAB, PAGES, lines_match, name_of, run_example

# Tests of their subjects show what the other pages show.
OFTEN = {"guides/ssd", "guides/servers"}
RUN = [
    pytest.param(page, marks=() if name_of(page) in OFTEN else pytest.mark.exhaustive)
    for page in PAGES
    if name_of(page) not in LAB
]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_example_runs_and_prints_the_documented_output(page, tmp_path):
    run_example(page, tmp_path)


def test_lines_are_compared_apart_from_their_numbers():
    assert lines_match("step 1/6  loss 5.61  980 tokens/s", "step 1/6  loss 5.6  1,200 tokens/s")
    assert lines_match("a step took 4 ms: computing 1 ms", "a step took 1.2 s: ...")
    assert not lines_match("step 1/6  loss 4.10  980 tokens/s", "step 1/6  loss 5.6 ...")
    assert not lines_match("state in memory; step 0", "state on files; step 0")
