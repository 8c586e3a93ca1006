"""Read and write the kept values in `kept/`."""

from __future__ import annotations

import gzip
import json
import sysconfig
import tarfile
from pathlib import Path
from typing import Any, get_args, get_origin

import cases
import pytest

KEPT = Path(__file__).parent / "kept"


def load(name: str) -> Any:
    return json.loads((KEPT / name).read_text())


def save(name: str, value: Any) -> None:
    (KEPT / name).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def unpack(name: str, to: Path, members: str = "") -> None:
    """Extract an archive into `to`. members: Extract only this folder."""
    with tarfile.open(KEPT / name) as archive:
        selected = [
            m for m in archive if m.name == members or m.name.startswith(members and members + "/")
        ]
        archive.extractall(to, selected, filter="data")


def pack(name: str, home: Path) -> None:
    """Archive all of `home`, without times and owners."""

    def bare(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(KEPT / name, "w:xz", preset=9) as archive:
        for path in sorted(home.iterdir()):
            archive.add(path, path.name, filter=bare)


def load_packed(name: str) -> Any:
    return json.loads(gzip.decompress((KEPT / name).read_bytes()))


def save_packed(name: str, value: Any) -> None:
    (KEPT / name).write_bytes(gzip.compress(json.dumps(value, sort_keys=True).encode(), mtime=0))


def plain(value: Any) -> Any:
    """Convert a value to JSON types: lists for tuples, text for keys of mappings and for bytes."""
    return json.loads(json.dumps(value, default=bytes.hex))


def without_machine(text: str) -> str:
    """Remove the path of Python's library on this machine from a text."""
    return text.replace(sysconfig.get_path("stdlib"), "STDLIB")


def job_with(values: dict[str, Any]) -> str:
    """A job file that sets dotted keys."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {toml(value)}")
    return "\n".join("\n".join([f"[{name}]", *lines]) for name, lines in sections.items()) + "\n"


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def example(kind: Any, count: list[int]) -> Any:
    """An example value of a message's type, different at every place."""
    count[0] += 1
    if get_origin(kind) is None:
        n = count[0]
        return {int: 1000 * n, bool: n % 2 == 0, str: f"text {n}", float: n + 0.125}[kind]
    inside = get_args(kind)
    if get_origin(kind) is tuple and inside == ((),):
        return []
    if get_origin(kind) is list or inside[-1:] == (...,):
        return [example(inside[0], count) for _ in range(2)]
    return [example(each, count) for each in inside]


def same_arithmetic(variant: cases.Variant) -> None:
    """Skip if plain torch trains to other bits here than on the machine of the kept values.

    Five losses of a small model can agree although its gradients differ in the last bit, so the
    widest model is trained too.
    """
    _same(variant.name, cases.plain_losses(variant))
    _same(cases.Variant().name, cases.plain_losses(cases.Variant()))


def same_job_arithmetic() -> None:
    _same("job", cases.plain_job_losses())
    _same(cases.Variant().name, cases.plain_losses(cases.Variant()))


def _same(name: str, here: tuple[str, ...]) -> None:
    kept = load("plain.json")[name]
    if kept != list(here):
        pytest.skip(
            f"plain torch trains to other bits on this processor\n{name}: {here} here, {kept} kept"
        )
