"""How far a reader walks to follow place(): the files that it enters and the boundaries that it crosses.

A boundary is crossed where a function of placement/ calls a function in another file of the package. Each pair of
functions counts once, in the thread that calls place(). What lies behind a file that was entered is that file's
own matter, so calls of other rooms do not count. By this measure commit 05e66bc crosses 74 boundaries.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import roadtrain

PACKAGE = Path(roadtrain.__file__).parent
MOST_FILES, MOST_CROSSINGS = 20, 40


def file_of(code: CodeType) -> str:
    """The file of the package in which `code` stands; "" for another one."""
    path = Path(code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


@contextmanager
def crossings() -> Iterator[set[tuple[str, str, str, str]]]:
    """(file, function, file entered, function) of each boundary that the body crosses."""
    found = set[tuple[str, str, str, str]]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, entered = frame.f_back.f_code, frame.f_code
        one, other = file_of(caller), file_of(entered)
        if one.startswith("placement/") and other not in ("", one):
            found.add((one, caller.co_qualname, other, entered.co_qualname))

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("where", ["files", "RAM"])
def test_place_is_a_short_walk(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = made()
    options: dict[str, Any] = {"store": tmp_path, "host_budget": "1GiB"} if where == "files" else {}
    with crossings() as found:
        placed = roadtrain.place(model, optimizer, **options, report=lambda line: None)
    placed.close()
    files = {entered for _, _, entered, _ in found}
    with capsys.disabled():
        print(f"\nplace(), state in {where}: {len(files)} files entered, {len(found)} crossings")
    assert len(files) <= MOST_FILES and len(found) <= MOST_CROSSINGS, "\n".join(
        f"{one} {caller} -> {other} {called}" for one, caller, other, called in sorted(found)
    )
