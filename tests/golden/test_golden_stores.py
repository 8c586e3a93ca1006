"""Stores of earlier code open with the same contents and continue with the same bits
(Rule 3)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cases
import fixtures
import pytest

LAST = cases.STORED + 3


def unpack_store(name: str, home: Path) -> dict[str, object]:
    fixtures.unpack("stores.tar.xz", home, name)
    kept: dict[str, object] = fixtures.load("stores.json")[name]
    return kept


@pytest.mark.parametrize("name", cases.STORES)
def test_a_kept_store_resumes(name: str, tmp_path: Path) -> None:
    kept, case = unpack_store(name, tmp_path), cases.STORES[name]
    with cases.placed(case, tmp_path / name) as (model, optimizer, _):
        assert optimizer.steps_done == cases.STORED
        assert cases.contents(case, model, optimizer) == kept.pop("held")
    found = cases.train(case, tmp_path / name, cases.STORED, LAST)
    fixtures.same_arithmetic(case.variant)
    assert found == kept


@pytest.mark.parametrize(
    ("name", "where"),
    [("one", "2 directories"), ("two", "1 directory"), ("one", "3 directories")],
)
def test_a_kept_store_is_converted(name: str, where: str, tmp_path: Path) -> None:
    """The store is converted to other directories; `moved_from` names a directory that it
    leaves."""
    kept, case = unpack_store(name, tmp_path), cases.STORES[name]
    left = sorted((tmp_path / name).glob("store*"))[int(where[0]) :]
    moved = replace(case, where=where, options={"moved_from": left} if left else {})
    with cases.placed(moved, tmp_path / name) as (model, optimizer, _):
        assert optimizer.steps_done == cases.STORED
        assert cases.contents(case, model, optimizer) == kept.pop("held")
    assert not any((directory / "CURRENT").exists() for directory in left)
    for directory in left:
        shutil.rmtree(directory)
    found = cases.train(replace(moved, options={}), tmp_path / name, cases.STORED, LAST)
    fixtures.same_arithmetic(case.variant)
    assert found == kept
