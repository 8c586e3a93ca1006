"""The examples and the papers name commands, options and files that exist."""

import ast
import importlib
import inspect
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import roadtrain
from roadtrain import cli
from roadtrain.config.cluster import load_cluster
from roadtrain.config.job import load_job, make_job
from roadtrain.config.plan_file import load_plan_file
from roadtrain.lab.lab_command import load_lab
from roadtrain.launch.resolve import resolve
from roadtrain.launch.write_kubernetes import write_kubernetes
from roadtrain.launch.write_slurm import write_slurm
from tests.support.guide_pages import FOLDERS, blocks_of, example_of, name_of, shell_lines
from tests.support.guide_pages import PAGES as GUIDES

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAPERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def check_roadtrain(words):
    """Parse `roadtrain COMMAND ...` as the command line would."""
    words = words[words.index("roadtrain") + 1 :]
    several = any(name.startswith(f"{words[0]} ") for name in cli.COMMANDS)
    name, rest = (" ".join(words[:2]), words[2:]) if several else (words[0], words[1:])
    cli.parse(name, rest)


@pytest.mark.parametrize("name", ["moe.toml", "stdlib.toml"])
def test_jobs_load(name):
    assert load_job(EXAMPLES / name).run.steps


def cluster_files(tmp_path):
    """Files that the writers generate from the example's plan and job."""
    home = EXAMPLES / "cluster"
    plan, job = load_plan_file(home / "plan.toml"), load_job(home / "job.toml")
    run = resolve(plan, job, name="small", addresses={}, token="REPLACE")
    write_slurm(run, tmp_path / "slurm")
    (tmp_path / "slurm" / "token").unlink()  # the token is not in the repository
    write_kubernetes(run, tmp_path, "IMAGE")
    (tmp_path / "run.yaml").rename(tmp_path / "kubernetes.yaml")
    return {
        path.relative_to(tmp_path): path.read_text()
        for path in tmp_path.rglob("*.*")
        if path.is_file()
    }


def test_the_files_for_slurm_and_kubernetes_are_up_to_date(tmp_path):
    """After changing a writer run `UPDATE_EXAMPLES=1 pytest
    tests/documentation/unit/test_examples.py`."""
    written = cluster_files(tmp_path)
    assert len(written) == 3
    for path, text in written.items():
        kept = EXAMPLES / "cluster" / path
        if os.environ.get("UPDATE_EXAMPLES"):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(text)
        assert kept.read_text() == text


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", PAPERS)
def test_links_in_papers_exist(name):
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_readme_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`roadtrain ([a-z][a-z-]+)", text))
    commands = {name.split()[0] for name in cli.COMMANDS}
    assert named and named <= commands


def calls_of(path):
    """The commands in the shell blocks of a page, as words; programs without their folder."""
    for line in shell_lines(path):
        words = shlex.split(line, comments=True)
        words = [Path(word).name if word.startswith(".venv/") else word for word in words]
        words = [word for word in words if word not in {"&", "done"}]
        if words and words[0] != "for":
            yield words


PAGES = [ROOT / "README.md", *GUIDES, *FOLDERS]
# All other commands that a page may use.
PROGRAMS = {"apt-get", "cd", "curl", "echo", "git", "jupyter", "kubectl", "make", "mkdir", "pip"}
PROGRAMS |= {"python", "ray", "sbatch", "truncate", "sleep", "tail", "torchrun", "wait", "."}
PROGRAMS |= {str(path.relative_to(ROOT)) for path in EXAMPLES.glob("*/run.sh")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_docs_parse(page):
    for words in calls_of(page):
        if "roadtrain" in words:
            check_roadtrain(words[words.index("roadtrain") :])
            continue
        if words[0].startswith(("(umask", "rank=")):  # creates a token; counts
            continue
        assert words[0] in PROGRAMS, words
        for word in words[1:]:
            if word.startswith("examples/"):
                assert (ROOT / word).exists(), words


def test_the_docs_have_commands():
    assert sum("roadtrain" in words for page in PAGES for words in calls_of(page)) >= 60


BASE_JOB = {"model": {"config": {"model_type": "llama"}}}


def load_file(title, text, folder):
    """Check a TOML block against the schema of the file named in its title; without a title, as
    part of a job."""
    path = folder / (title or "part.toml")
    path.write_text(text)
    if path.stem.startswith("cluster"):
        return load_cluster(path)
    if path.stem.startswith("lab"):
        return load_lab(path)
    if path.stem.startswith("plan"):
        return load_plan_file(path)
    return make_job(tomllib.loads(text) if title else BASE_JOB | tomllib.loads(text))


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_toml_in_the_docs_loads(page, tmp_path):
    for block in blocks_of(page.read_text()):
        if block.kind == "toml":
            load_file(block.title, block.text, tmp_path)


def check_call(node, found):
    """Check that every argument in a call of a roadtrain function exists."""
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for keyword in node.keywords:
        assert keyword.arg in parameters, f"{ast.unparse(node)}: no {keyword.arg}"


def check_python(text):
    """Check that the block compiles and that its imports and the arguments of roadtrain calls
    exist."""
    names = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "roadtrain":
            module = importlib.import_module(node.module)
            names |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("roadtrain."):
                    names[alias.asname] = importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = roadtrain if node.value.id == "roadtrain" else names.get(node.value.id)
            if owner is not None:
                names[ast.unparse(node)] = getattr(owner, node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := names.get(ast.unparse(node.func))):
            check_call(node, found)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_python_in_the_docs_matches_the_code(page):
    for block in blocks_of(page.read_text()):
        if block.kind == "python":
            check_python(block.text)


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_every_guide_has_an_example(page):
    assert any(block.kind == "sh" for block in example_of(page))


RUN = [page for page in FOLDERS if page.parent.name != "cluster"]  # `launch --write` writes that


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_every_example_has_commands_an_output_and_a_line_in_the_table(page):
    kinds = {block.kind for block in example_of(page)}
    assert kinds == ({"sh"} if page.parent.name == "notebook" else {"sh", "text"})
    assert len(page.read_text().split()) < 150 or page.parent.name == "two-clusters"
    assert f"({page.parent.name}/README.md)" in (EXAMPLES / "README.md").read_text()


def test_links_in_the_examples_exist():
    for page in [EXAMPLES / "README.md", *FOLDERS]:
        links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
        assert not [link for link in links if not (page.parent / link).exists()], page
