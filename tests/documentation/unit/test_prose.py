"""Counts of hard-to-read prose, which may only fall. Lower a number here when its count has
fallen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

prose = pytest.importorskip("docs.prose", reason="the core is tested without docs/")

ROOT = Path(__file__).parents[3]
# The participle is `launch --comes`, an option that users type.
ALLOWED = {"opener": 0, "subject": 0, "one": 0, "participle": 1}
# Words of the pages in docs/ without the log and decisions, and of the log.
MOST_WORDS, MOST_LOG_WORDS = 25_760, 5_000


@pytest.mark.slow
def test_the_counts_do_not_rise():
    found = list(prose.findings([ROOT / path for path in prose.PATHS]))
    listed = "\n".join(f"{f.path}:{f.line}: {f.kind}: {f.text}" for f in found)
    counts = Counter(f.kind for f in found)
    assert {kind: counts[kind] for kind in ALLOWED} == ALLOWED, listed


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('def f():\n    """Of a server: its name."""\n', ["opener"]),
        ('def f():\n    """Return the name. Who asks twice is refused."""\n', ["subject"]),
        ("# the name; what comes twice is refused\n", ["subject"]),
        ('raise ValueError(f"{x}: who comes twice is refused", hint="no")\n', ["subject"]),
        ("f(help='what is given is used')\n", ["subject"]),
        ("for one in x: ...\n", ["one"]),
        ("def f(one): ...\n", ["one"]),
        ("x.said = 1\n", ["participle"]),
        ("class Told: ...\n", ["participle"]),
        ("with x as _given: ...\n", ["participle"]),
        ("try: ...\nexcept ValueError as one: ...\n", ["one"]),
        ("import x as one\n", ["one"]),
        ("match x:\n    case [one]: ...\n", ["one"]),
        ('def f():\n    """Return what the server holds."""\n    return x.given\n', []),
    ],
)
def test_python_is_read(tmp_path, text, kinds):
    path = tmp_path / "x.py"
    path.write_text(text)
    assert [f.kind for f in prose.findings([path])] == kinds


def test_markdown_is_read_outside_code(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("```\nWho waits is late.\n```\nA server answers. Who waits is late.\n")
    assert [f.kind for f in prose.findings([tmp_path])] == ["subject"]


def test_the_documentation_stays_short():
    pages = [p for p in ROOT.glob("docs/**/*.md") if "decisions" not in p.parts]
    log = ROOT / "docs/log.md"
    assert sum(len(p.read_text().split()) for p in pages if p != log) <= MOST_WORDS
    assert len(log.read_text().split()) <= MOST_LOG_WORDS
