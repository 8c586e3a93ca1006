"""The docstrings of the public API name each argument, and the documentation fits its page."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import roadtrain

generate = pytest.importorskip("docs.generate", reason="needs mkdocs")

ROOT = Path(__file__).parents[3]


def find(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def documented():
    """Names of all public functions, classes and methods in the reference."""
    for path, methods in generate.REFERENCE.items():
        yield path, find(path)
        for method in methods:
            yield f"{path}.{method}", getattr(find(path), method)


def test_the_reference_has_every_public_name():
    public = {f"roadtrain.{name}" for name in roadtrain.__all__}
    assert public <= set(generate.REFERENCE)
    assert next(iter(generate.REFERENCE)) == "roadtrain.place"


@pytest.mark.parametrize("path", [path for path, _ in documented()])
def test_docstrings_name_each_argument(path):
    found = dict(documented())[path]
    assert inspect.getdoc(found), f"{path} has no docstring"
    if path in MADE_BY_US or isinstance(found, property) or not callable(found):
        return
    parameters = inspect.signature(found).parameters.values()
    hidden = {"self", "cls"}
    named = [p.name for p in parameters if p.name not in hidden]
    assert [*generate.arguments(found.__doc__)] == named


# Users get these from a function; they do not construct them.
MADE_BY_US = {
    "roadtrain.PlacedOptimizer",
    "roadtrain.stages.parallel_training.ParallelTraining",
    "roadtrain.RoadtrainError",
}


def test_the_check_finds_what_is_missing():
    text = "Do.\n\nArgs:\n    first: One.\n    **rest: Two,\n        in two lines.\n\nReturns:\n    x: Three.\n"
    assert generate.arguments(text) == {"first": "One.", "rest": "Two, in two lines."}
    assert generate.arguments("Do.\n\nReturns:\n    first: One.\n") == {}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += [*sorted(ROOT.glob("docs/[!d]*/*.md"))]  # decisions are not pages for users


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_does_not_scroll_sideways(page):
    lines, code = [], False
    for line in page.read_text().splitlines():
        fence = line.lstrip().startswith("```")
        code ^= fence
        if code and not fence:
            lines.append(line)
    assert not [line for line in lines if len(line) > 78]


CODE = [
    path
    for d in ("src", "plugins", "benchmarks", "tests", "docs")
    for path in ROOT.glob(f"{d}/**/*.py")
]


@pytest.mark.slow
def test_files_and_members_that_pages_name_exist():
    members: dict[str, set[str]] = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                inside = members.setdefault(node.name, set())
                inside |= {getattr(x, "name", getattr(x, "attr", "")) for x in ast.walk(node)}
                inside |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for name in re.findall(r"`([\w/]+\.py)`", text):
            if not any(f"/{path}".endswith(f"/{name}") for path in CODE) and "paced" not in name:
                wrong.append(f"{page.name}: {name}")  # the exercise in CONTRIBUTING creates `paced`
        for owner, member in re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)[`(]", text):
            if member not in members.get(owner, ()):
                wrong.append(f"{page.name}: {owner}.{member}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_options_are_up_to_date(page):
    assert "<!-- options" not in generate.option_tables(page.read_text())


def test_a_table_of_unknown_options_is_refused():
    with pytest.raises(ValueError, match="no surprise"):
        generate.option_tables("<!-- options: Files | surprise -->")


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/rooms/*.md")), ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_page_of_a_room_lists_files_that_have_a_docstring(page):
    listed = re.findall(r"(?m)^\d+\. `[\w/]+\.py`$", page.read_text())
    described = generate.described_files(page.read_text())
    assert listed and all(f"{line}: " in described for line in listed)
