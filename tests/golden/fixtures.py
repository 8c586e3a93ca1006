"""Reading and writing what is kept in `kept/`."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import cases
import pytest

KEPT = Path(__file__).parent / "kept"


def load(name: str) -> Any:
    return json.loads((KEPT / name).read_text())


def save(name: str, value: Any) -> None:
    (KEPT / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def unpack(name: str, to: Path, members: str = "") -> None:
    """The archive's files into `to`; `members`: only what lies in that folder."""
    with tarfile.open(KEPT / name) as archive:
        wanted = [
            m for m in archive if m.name == members or m.name.startswith(members and members + "/")
        ]
        archive.extractall(to, wanted, filter="data")


def pack(name: str, home: Path) -> None:
    """All of `home`, without times and owners."""

    def bare(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(KEPT / name, "w:xz", preset=9) as archive:
        for path in sorted(home.iterdir()):
            archive.add(path, path.name, filter=bare)


def same_arithmetic(variant: cases.Variant) -> None:
    """Skips where torch itself, without roadtrain, trains to other bits than on the machine of
    the kept ones."""
    kept, here = load("plain.json")[variant.name], list(cases.plain_losses(variant))
    if kept != here:
        pytest.skip(
            f"plain torch differs on this machine: {variant.name}: {here} here, {kept} kept"
        )
