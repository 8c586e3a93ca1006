"""How large the house is: code lines, formatted, without blank, comment and docstring lines. The
number is an aim and a ratchet (docs/design.md): a rise needs a line in docs/decisions."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "roadtrain"
AIM = 17_500
RATCHET = 54_450  # docs/decisions/0038; only ever lowered without a line there
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take."""
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


def test_the_package_does_not_grow(capsys) -> None:
    total = sum(code_lines(path.read_text()) for path in SRC.rglob("*.py"))
    with capsys.disabled():
        print(f"\ncode lines of the package: {total:,} (aim {AIM:,}, ratchet {RATCHET:,})")
    assert total <= RATCHET, "a line in docs/decisions says why"
