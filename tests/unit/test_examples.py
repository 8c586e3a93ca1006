"""The examples and the papers name commands, options and files that exist."""

import os
import re
import shlex
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.config.job import load_job
from roadtrain.config.plan_file import load_plan_file
from roadtrain.launch.resolve import resolve
from roadtrain.launch.write_kubernetes import write_kubernetes
from roadtrain.launch.write_slurm import write_slurm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAPERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def check_roadtrain(words):
    """`roadtrain COMMAND ...` as the command line would take it."""
    words = words[words.index("roadtrain") + 1 :]
    several = any(name.startswith(f"{words[0]} ") for name in cli.COMMANDS)
    name, rest = (" ".join(words[:2]), words[2:]) if several else (words[0], words[1:])
    cli.parse(name, rest)


@pytest.mark.parametrize("name", ["moe.toml", "stdlib.toml"])
def test_jobs_load(name):
    assert load_job(EXAMPLES / name).run.steps


def cluster_files(tmp_path):
    """What the writers make of the example's plan and job."""
    home = EXAMPLES / "cluster"
    plan, job = load_plan_file(home / "plan.toml"), load_job(home / "job.toml")
    run = resolve(plan, job, name="small", addresses={}, token="REPLACE")
    write_slurm(run, tmp_path / "slurm")
    (tmp_path / "slurm" / "token").unlink()  # which is not in the repository
    write_kubernetes(run, tmp_path, "IMAGE")
    (tmp_path / "run.yaml").rename(tmp_path / "kubernetes.yaml")
    return {
        path.relative_to(tmp_path): path.read_text()
        for path in tmp_path.rglob("*.*")
        if path.is_file()
    }


def test_the_files_for_slurm_and_kubernetes_are_what_the_plan_gives(tmp_path):
    """After a change of a writer: `UPDATE_EXAMPLES=1 pytest tests/unit/test_examples.py`."""
    written = cluster_files(tmp_path)
    assert len(written) == 3
    for path, text in written.items():
        kept = EXAMPLES / "cluster" / path
        if os.environ.get("UPDATE_EXAMPLES"):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(text)
        assert kept.read_text() == text


def test_readme_fits_its_frame():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", PAPERS)
def test_papers_link_to_what_is_there(name):
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_readme_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`roadtrain ([a-z][a-z-]+)", text))
    known = {name.split()[0] for name in cli.COMMANDS}
    assert named and named <= known


def commands_of(path):
    """The calls of `roadtrain` in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    names = [[Path(word).name if "/" in word else word for word in call] for call in calls]
    return [call for call in names if "roadtrain" in call]


PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", *sorted(ROOT.glob("docs/guides/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_in_the_docs_parse(page):
    for call in commands_of(page):
        call = call[:-1] if call[-1] == "&" else call
        check_roadtrain(call[call.index("roadtrain") :])


def test_the_docs_have_commands():
    assert sum(len(commands_of(page)) for page in PAGES) >= 15
