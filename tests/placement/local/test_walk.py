"""Number of files that place() enters and of file boundaries that it crosses.

These numbers say how much a reader must read to follow place(). A boundary is crossed when a function
of placement/ calls a function in another file of the package. Each pair of functions counts once, in
the thread that calls place(). Calls between other folders do not count, because each file is
responsible for the calls it makes. By this measure commit 05e66bc crosses 74 boundaries.
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
MOST_FILES, MOST_CROSSINGS = 22, 41


def file_of(code: CodeType) -> str:
    """Return the file of the package that contains `code`, or "" for code outside the package."""
    path = Path(code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


@contextmanager
def crossings() -> Iterator[set[tuple[str, str, str, str]]]:
    """Collect (file, function, file entered, function) of each boundary that the body crosses."""
    crossed = set[tuple[str, str, str, str]]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, entered = frame.f_back.f_code, frame.f_code
        source, target = file_of(caller), file_of(entered)
        if source.startswith("placement/") and target not in ("", source):
            crossed.add((source, caller.co_qualname, target, entered.co_qualname))

    sys.setprofile(watch)
    try:
        yield crossed
    finally:
        sys.setprofile(None)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("where", ["files", "RAM"])
def test_place_enters_few_files(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build()
    options: dict[str, Any] = {"store": tmp_path, "host_budget": "1GiB"} if where == "files" else {}
    with crossings() as crossed:
        placed = roadtrain.place(model, optimizer, **options, report=lambda line: None)
    placed.close()
    files = {entered for _, _, entered, _ in crossed}
    with capsys.disabled():
        print(f"\nplace(), state in {where}: {len(files)} files entered, {len(crossed)} crossings")
    assert len(files) <= MOST_FILES and len(crossed) <= MOST_CROSSINGS, "\n".join(
        f"{source} {caller} -> {target} {called}"
        for source, caller, target, called in sorted(crossed)
    )
