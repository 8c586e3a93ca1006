"""An unfinished store is created again after a power cut at any moment of its removal
(Rule 3)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_store_file import META, OWNERS, RECORDS, random_bytes

from benchmarks.soak import power as soak_power
from benchmarks.soak.power import Power, Strike, begin, cut
from roadtrain.storage.generation import create_store, open_store
from roadtrain.storage.tier import RECORD


class Killed(BaseException):
    pass


class NothingElse:
    """A power cut that loses all unsynced bytes and names."""

    def choice(self, options):
        assert "none" in options
        return "none"


def half_made(directories: list[Path]) -> None:
    """Create a store killed before its commit: all directories except 0 hold step 0."""
    store = create_store(directories, META, OWNERS)
    try:
        for chunk in RECORDS:
            store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
        store.tiers[1].prepare(0, b"")
    finally:
        store.close()


@pytest.mark.slow
def test_a_power_cut_at_any_sync_of_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        power.roots = ()  # a killed process does none of the cleanup that follows
        raise Killed

    monkeypatch.setattr(soak_power, "_die", die)
    for number in range(40):
        home = tmp_path / str(number)
        directories, shadow = [home / "a", home / "b"], home / "shadow"
        for directory in directories:
            directory.mkdir(parents=True)
        half_made(directories)
        begin(shadow, directories)
        power = Power(shadow, directories, [Strike("sync", number, "kill before")])
        with monkeypatch.context() as patch:
            for name in ("fsync", "fdatasync", "pwritev", "write"):
                patch.setattr(os, name, getattr(os, name))  # restored afterwards
            power.install()
            try:
                assert open_store(directories) is None
                half_made(directories)
            except Killed:
                pass
            else:
                assert number > 10
                break
        cut(shadow, directories, NothingElse())
        assert open_store(directories) is None
        half_made(directories)
    else:
        raise AssertionError("no run reached its end")
