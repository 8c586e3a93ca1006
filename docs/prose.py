"""Find prose that a reader stumbles on: python docs/prose.py [PATH ...]

Prints each finding with its place, and the four counts:

    opener      a docstring begins with Of, What, Who, Whose, As, By, Where, Those, That or Which
    subject     "who ..." or "what ..." is the subject of a sentence
    one         `one` is the name of a variable, argument, attribute, function or class
    participle  a name is a bare participle or a verb of saying: said, told, heard, gone, asked, ...

Reads docstrings, comments, strings given to exceptions, to `hint=`, `help=` and `description=`, and
Markdown outside code blocks. It finds candidates, and does NOT judge: a sentence may pass and still
be hard to read. tests/documentation/unit/test_prose.py keeps the counts from rising.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PATHS = ("src", "benchmarks", "plugins", "examples", "docs", "README.md", "CONTRIBUTING.md")

OPENER = re.compile(r"(Of|What|Who|Whose|As|By|Where|Those|That|Which)\b")
VERBS = "is|are|has|have|was|goes|comes|says|waits|hears|knows|gets|leaves"
SUBJECT = re.compile(
    rf"(?:(?<=[.:;] )|^)(?:[Ww]ho|[Ww]hat|[Ww]hose) (?:[\w`']+ ){{1,6}}(?:{VERBS})\b(?![^.]*\?)"
)
NAMES = re.compile(
    "said|told|heard|given|taken|came|comes|gone|asked|wanted|known|tells?|hears?|says"
)


class Finding(NamedTuple):
    kind: str
    path: Path
    line: int
    text: str


def findings(paths: list[Path]) -> Iterator[Finding]:
    """Yield the findings in files, and in the Python and Markdown files below folders."""
    for path in paths:
        files = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for file in files:
            yield from (_python if file.suffix == ".py" else _markdown)(file)


def _python(path: Path) -> Iterator[Finding]:
    source = path.read_text()
    texts = []
    for node in ast.walk(ast.parse(source)):
        for line, text in _texts(node):
            texts.append((line, text))
            if not isinstance(node, ast.Raise | ast.keyword) and OPENER.match(text):
                yield Finding("opener", path, line, text.partition("\n")[0])
        for line, name in _names(node):
            bare = name.strip("_").lower()
            if bare == "one" or NAMES.fullmatch(bare):
                yield Finding("one" if bare == "one" else "participle", path, line, name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string.lstrip("# ")))
    for line, text in texts:
        for match in SUBJECT.finditer(text.replace("\n", " ")):
            yield Finding("subject", path, line, match[0])


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of a docstring, of a raised error, and of a help text."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if doc := ast.get_docstring(node):
            yield node.body[0].lineno, doc
    elif isinstance(node, ast.Raise) and node.exc is not None:
        yield node.lineno, _literals(node.exc)
    elif isinstance(node, ast.keyword) and node.arg in ("hint", "help", "description"):
        yield node.value.lineno, _literals(node.value)


def _markdown(path: Path) -> Iterator[Finding]:
    code = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    text = code.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
    for match in SUBJECT.finditer(text.replace("\n", " ")):
        yield Finding("subject", path, text.count("\n", 0, match.start()) + 1, match[0])


def _literals(node: ast.expr) -> str:
    """The literal text of an expression, f-strings included."""
    constants = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
    return " ".join(part.value for part in constants if isinstance(part.value, str))


def _names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of what `node` binds."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            yield node.lineno, name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield node.lineno, name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield node.lineno, name
        case ast.ClassDef(name=name):
            yield node.lineno, name
        case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
            yield node.lineno, name
        case ast.alias(asname=str(name)):
            yield node.lineno, name


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:] or PATHS]
    found = list(findings(paths))
    for finding in found:
        print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
    counts = Counter(finding.kind for finding in found)
    print(
        ", ".join(f"{kind} {counts[kind]}" for kind in ("opener", "subject", "one", "participle"))
    )


if __name__ == "__main__":
    main()
