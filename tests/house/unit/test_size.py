"""Size of the package and its core in code lines: formatted, without blank, comment and docstring
lines. Neither may rise (docs/design.md, "Size"; where the lines went: docs/decisions/0039)."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "roadtrain"
# May only fall, unless a line in docs/decisions raises it.
PACKAGE, CORE = 53_441, 17_010
CORE_ROOMS = (
    *("errors", "units", "chunks", "retry", "environment"),
    *("options", "kernels", "device", "transport", "streaming", "storage", "servers", "placement"),
)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that belong to docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def test_counting() -> None:
    text = '"""Says."""\n\n# why\nx = (\n    1,\n)\n\n\ndef f():\n    """Does."""\n    return x\n'
    assert code_lines(text) == 5


@pytest.mark.slow
def test_neither_grows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {path.relative_to(SRC): code_lines(path.read_text()) for path in SRC.rglob("*.py")}
    package = sum(lines.values())
    core = sum(n for path, n in lines.items() if path.with_suffix("").parts[0] in CORE_ROOMS)
    with capsys.disabled():
        print(f"\ncode lines: package {package:,} (at most {PACKAGE:,}), core {core:,} ({CORE:,})")
    counts = f"package {package:,} of {PACKAGE:,}, core {core:,} of {CORE:,}"
    assert package <= PACKAGE and core <= CORE, (
        f"{counts}: remove as many lines as you add, or raise the limits here and say why in"
        " docs/decisions/0039-the-third-house.md"
    )
