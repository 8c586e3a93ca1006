"""Generate the site's reference pages from the code at every build, so that they stay up to date.

mkdocs calls the functions `on_*`. `on_files` adds a page for each function of `PAGES`: tables made
from the code, and the papers at the top of the repository. `on_page_markdown` replaces each marker
`<!-- options: ... -->` of a page by a table of options (`option_tables`). Nothing is written into
`docs/`.
Assumes that `roadtrain` can be imported (`make docs` sets the path). Does NOT write prose.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import itertools
import re
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

import roadtrain
from roadtrain import cli, errors
from roadtrain.config.cluster import Cluster
from roadtrain.config.job import Job
from roadtrain.doctor.diagnosis import faults
from roadtrain.lab.lab_command import LabFile
from roadtrain.options.schema import section_in

ROOT = Path(__file__).parents[1]
MADE = "*This page is generated from the code.*\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


# The public names in the order of use, each with the methods that users call.
REFERENCE: Mapping[str, tuple[str, ...]] = {
    "roadtrain.place": (),
    "roadtrain.PlacedOptimizer": (
        *("step", "zero_grad", "track", "flush", "close", "committed_step"),
        *("state_dict", "load_state_dict", "read", "params"),
        *("metrics", "grad_norm", "stages", "memory"),
    ),
    "roadtrain.Files": (),
    "roadtrain.Memory": (),
    "roadtrain.Servers": (),
    "roadtrain.FanIn": (),
    "roadtrain.SwitchNode": (),
    "roadtrain.TopK": (),
    "roadtrain.Downcast": (),
    "roadtrain.Delay": (),
    "roadtrain.Lion": (),
    "roadtrain.Trackers": ("log", "close"),
    "roadtrain.parallelize": (),
    "roadtrain.ParallelOptions": (),
    "roadtrain.Parallelism": (),
    "roadtrain.MicroBatch": (),
    "roadtrain.stages.parallel_training.ParallelTraining": (
        *("model", "rank", "steps_done", "step", "evaluate", "snapshot", "abandon", "close"),
    ),
    "roadtrain.Summation": ("close",),
    "roadtrain.sum_hook": (),
    "roadtrain.sum_fsdp": (),
    "roadtrain.RoadtrainError": (),
}


def api() -> str:
    """The reference of the Python API, from `place` on."""
    text = ["# Python API\n", MADE, "Import each name from `roadtrain`, as in `roadtrain.place`.\n"]
    for path, methods in REFERENCE.items():
        module, _, name = path.rpartition(".")
        members = "[" + ", ".join(methods) + "]" if methods else "false"
        text.append(f"::: {_home(getattr(importlib.import_module(module), name))}\n    options:\n")
        text.append(f"      members: {members}\n      inherited_members: {members}\n")
    return "".join(text)


def arguments(docstring: str | None) -> dict[str, str]:
    """The names in the `Args:` section of a docstring and their meaning, in order."""
    lines = inspect.cleandoc(docstring or "").partition("\nArgs:\n")[2].splitlines()
    section = "\n".join(itertools.takewhile(lambda line: not line or line[0] == " ", lines))
    found = re.findall(r"(?m)^ {4}\*{0,2}(\w+): (.*(?:\n {8}.*)*)", section)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _fields(kind: type) -> Iterator[str]:
    """A row for each argument of a public class."""
    parameters = inspect.signature(kind).parameters
    for name, meaning in arguments(kind.__doc__).items():
        value = parameters[name].default
        default = "needed" if value is inspect.Parameter.empty else f"`{value!r}`"
        yield f"| `{name}` | {_cell(default)} | {_cell(meaning)} |"


def _home(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def job() -> str:
    intro = (
        "A job is a TOML file that describes one training run, for `roadtrain train`,"
        " `verify` and `import`. Every key is also an option of the command line, which overrides"
        " the file: `--optimizer.lr 1e-4`. An unknown key is refused with an error that suggests"
        " the most similar key.\n"
    )
    return "\n".join(["# Keys of a job\n", MADE, intro, *_sections(Job)])


def cluster() -> str:
    text = ["# Keys of a cluster\n", MADE, _example(Cluster)]
    return "\n".join([*text, *_sections(Cluster)])


def lab() -> str:
    intro = "LAB.toml describes an emulated cluster on one machine ([guide](../guides/lab.md)).\n"
    return "\n".join(["# Keys of a lab\n", MADE, intro, *_sections(LabFile)])


def commands() -> str:
    text = ["# Commands\n", MADE, f"```text\n{_output('--help')}\n```\n"]
    for name in cli.COMMANDS:
        text.append(f"## {name}\n\n```text\n{_output(*name.split(), '--help')}\n```\n")
    return "\n".join(text)


def errors_page() -> str:
    intro = (
        "Every error that roadtrain raises on purpose is a `roadtrain.RoadtrainError`. Its"
        " message states the problem, with both numbers; `hint:` suggests a solution. Commands"
        " then exit with code 2.\n"
    )
    tree = (errors.__doc__ or "").strip().partition("\n\n")[2]
    return "\n".join(["# Errors\n", MADE, intro, f"```text\n{tree}\n```\n"])


def file_map() -> str:
    """List all files, with the first sentence of each docstring."""
    intro = (
        "Rooms are stacked, and imports only go down ([design](../design.md#the-house))."
        " A line is the beginning of the file's docstring, which goes on with what the file"
        " assumes and what it does not do.\n"
    )
    text = ["# File map\n", MADE, intro]
    for top in ("src/roadtrain", "benchmarks"):
        rooms = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        text += [_room(room, ROOT / top) for room in rooms]
    return "\n".join(text)


def _room(room: Path, top: Path) -> str:
    text = [f"## {room.relative_to(top.parent)}/\n"]
    rows = ["| file | holds |", "|---|---|"]
    for path in sorted(room.glob("*.py")):
        sentence = _first_sentence(path)
        if path.name == "__init__.py":
            text.append(f"{sentence}\n")
        elif sentence:
            rows.append(f"| `{path.name}` | {_cell(sentence)} |")
    return "\n".join([*text, *rows, ""])


def _first_sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(paragraph.split()), maxsplit=1)[0]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the tables of options, and list the decisions in their index."""
    markdown = described_files(option_tables(markdown)).replace("<!-- faults -->", fault_table())
    for name, target in PAPERS.items():
        up = "../" * page.file.src_uri.count("/")
        markdown = re.sub(rf"\]\((\.\./)*{re.escape(name)}", f"]({up}{target}", markdown)
    if page.file.src_uri != "decisions/index.md":
        return markdown
    rows = ["", "| | |", "|---|---|"]
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        number, _, title = path.read_text().splitlines()[0].lstrip("# ").partition(" ")
        rows.append(f"| {number} | [{title}]({path.name}) |")
    return "\n".join([markdown, *rows])


def described_files(markdown: str) -> str:
    """Complete list items that consist of a file of the package with what its docstring says."""

    def described(found: re.Match[str]) -> str:
        return f"{found[1]}`{found[2]}`: {_first_sentence(ROOT / 'src/roadtrain' / found[2])}"

    return re.sub(r"(?m)^(\d+\. )`([\w/]+\.py)`$", described, markdown)


def fault_table() -> str:
    """Make a table of the faults that `roadtrain doctor` names."""
    rows = ["| fault | level | found if |", "|---|---|---|"]
    for entry, texts in faults().items():
        if "about" in texts:
            rows.append(f"| `{entry}` | {texts['level']} | {_cell(texts['about'])} |")
    return "\n".join(rows)


MARKER = re.compile(r"<!-- options: (.+?) -->")
FILES: dict[str, type[BaseModel]] = {"job": Job, "cluster": Cluster, "lab": LabFile}


def option_tables(markdown: str) -> str:
    """Replace each marker by a table; a name behind `|` selects rows.

    `<!-- options: job servers | relay replicas -->` is a section of a file that users write,
    `<!-- options: roadtrain serve -->` a command, `<!-- options: Servers -->` a dataclass.

    Raises:
        ValueError: The marker names an option, section or class that does not exist.
    """
    return MARKER.sub(lambda found: "\n".join(_option_table(found[1])), markdown)


def _option_table(marker: str) -> list[str]:
    words, _, selected = marker.partition("|")
    kind, _, path = words.strip().partition(" ")
    if kind in FILES:
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        rows = list(_rows(_section(FILES[kind], path)))
    elif kind == "roadtrain":
        head = ["| option | meaning |", "|---|---|"]
        options = cli.options_of(cli.COMMANDS[path].target)
        rows = [
            f"| `--{name.replace('_', '-')}` | {_cell(option.text)} |"
            for name, option in options.items()
        ]
    else:
        head = ["| field | default | meaning |", "|---|---|---|"]
        rows = list(_fields(getattr(roadtrain, kind)))
    if selected:
        by_name = {row.split("`")[1].removeprefix("--"): row for row in rows}
        if unknown := set(selected.split()) - set(by_name):
            raise ValueError(f"options: {marker}: no {', '.join(sorted(unknown))}")
        rows = [by_name[name] for name in selected.split()]
    return [*head, *rows]


def _section(model: type[BaseModel], path: str) -> type[BaseModel]:
    """The model at a dotted path below another one."""
    for name in filter(None, path.split(".")):
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        if name not in fields or (model := section_in(fields[name].annotation)) is None:
            raise ValueError(f"options: no section {path!r}")
    return model


PAPERS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
}


def paper(name: str) -> Callable[[], str]:
    """Return a function that generates the page of a top-level document.

    Links are changed to the pages of the site; a link to a file that is not on the site becomes
    plain text.
    """
    up = "../" * PAPERS[name].count("/")

    def target(found: re.Match[str]) -> str:
        text, link = found.groups()
        if link.startswith(("http", "#")):
            return found[0]
        if link.startswith("docs/"):
            return f"[{text}]({up}{link.removeprefix('docs/')})"
        return f"[{text}]({up}{PAPERS[link]})" if link in PAPERS else text

    return lambda: re.sub(r"\[([^\]]*)\]\(([^)]*)\)", target, (ROOT / name).read_text())


def _example(model: type[BaseModel]) -> str:
    """Format the docstring of the module of a file's schema, with its indented part as TOML."""
    text = (importlib.import_module(model.__module__).__doc__ or "").strip()
    return re.sub(
        r"\n\n((?: {4}.*\n)+)\n?",
        lambda found: "\n\n```toml\n" + re.sub(r"(?m)^ {4}", "", found[1]) + "```\n\n",
        text,
    )


def _sections(model: type[BaseModel], path: str = "", several: bool = False) -> Iterator[str]:
    """Yield a heading and a table for `model`, then those of the models in its fields."""
    inner: list[tuple[str, type[BaseModel], bool]] = []
    rows = ["| key | type | default | meaning |", "|---|---|---|---|", *_rows(model)]
    for name, field in model.model_fields.items():
        key = field.alias or name
        if (found := section_in(field.annotation)) is not None:
            several = typing.get_origin(field.annotation) in (list, tuple)
            inner.append((f"{path}.{key}" if path else key, found, several))
    if path:
        yield f"## `[[{path}]]`\n" if several else f"## `[{path}]`\n"
    if path and model.__doc__ and model.__doc__ != BaseModel.__doc__:
        yield " ".join(model.__doc__.split()) + "\n"
    if len(rows) > 2:
        yield "\n".join(rows) + "\n"
    for inside, found, several in inner:
        yield from _sections(found, inside, several)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    """A row for each key that holds a value, not a section."""
    for name, field in model.model_fields.items():
        if section_in(field.annotation) is None:
            kind, meaning = _cell(_type_of(field)), _cell(field.description or "")
            yield f"| `{field.alias or name}` | {kind} | {_default(field)} | {meaning} |"


def _type_of(field: FieldInfo) -> str:
    """Name a field's type. A number parsed by a validator is written with a unit."""
    read = any(isinstance(rule, BeforeValidator) for rule in field.metadata)
    with_unit = read and field.annotation is float
    return "number with a unit" if with_unit else _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    """Name a type in TOML's terms."""
    names = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        dict: "table",
    }
    if annotation in names:
        return names[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args if arg is not types.NoneType)
    if origin in (list, tuple):
        return "list of " + _type_name(args[0])
    if origin in (dict, Mapping):
        return "table"
    return str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    here = sysconfig.get_path("stdlib") in str(value)  # differs between machines
    return "" if here or value in (None, "", (), [], {}) else f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _output(*args: str) -> str:
    """Run the command line and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(list(args))
    return out.getvalue().strip()


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api,
    "reference/commands.md": commands,
    "reference/job.md": job,
    "reference/cluster.md": cluster,
    "reference/lab.md": lab,
    "reference/errors.md": errors_page,
    "contributing/files.md": file_map,
    "index.md": paper("README.md"),
    "contributing/index.md": paper("CONTRIBUTING.md"),
    "changelog.md": paper("CHANGELOG.md"),
}
