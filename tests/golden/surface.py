"""What the goldens use of roadtrain: the only file of this directory that imports from inside the
package.

When a module moves or a class gets another name, this file is mended and nothing else here: what is
kept stays as it is. `tests/golden/README.md` says when a kept value may change.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import roadtrain
from roadtrain import cli
from roadtrain.runtime.session_host import Host
from roadtrain.storage.direct import DirectFile
from roadtrain.storage.sealed import unsealed
from roadtrain.streaming import plain
from roadtrain.transport.tcp import Options

SERVER_BUDGET = 96 << 20  # bytes
SPILL = "spill.bin"  # the file of gradients that wait for their update


def silent(_: str) -> None: ...


def place(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """roadtrain.place with the option names of the first edition."""
    return roadtrain.place(model, optimizer, **{"report": silent, "deadline_s": 60, **options})


@contextlib.contextmanager
def serving(directories: Sequence[Path]) -> Iterator[list[str]]:
    """A server of this process for each directory; HOST:PORT of each."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for directory in directories:
            host = stack.enter_context(
                Host(("127.0.0.1", 0), directory, SERVER_BUDGET, Options(), silent)
            )
            thread = threading.Thread(target=host.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(host.stop)
            hosts.append(host.where)
        yield hosts


@contextlib.contextmanager
def counting_spills() -> Iterator[list[int]]:
    """The bytes of each gradient that is written to a spill file meanwhile."""
    write, seen = DirectFile.write, list[int]()

    def counted(self: DirectFile, view: memoryview, *rest: Any) -> None:
        if self.path.name == SPILL:
            seen.append(len(view))
        write(self, view, *rest)

    DirectFile.write = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DirectFile.write = write  # type: ignore[method-assign]


def command(*words: str) -> tuple[int, str]:
    """`roadtrain WORDS`: its exit code and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(list(words))
    return code, out.getvalue()


def options_in(text: str) -> set[str]:
    """The options that a help text names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", text))


@contextlib.contextmanager
def states_by_torch_save() -> Iterator[None]:
    """Only to make fixtures: the state of a job is committed as the first edition wrote it."""

    def encode(value: Any, what: str = "") -> bytes:
        out = io.BytesIO()
        torch.save(value, out)
        return out.getvalue()

    now, plain.encode = plain.encode, encode  # type: ignore[assignment]
    try:
        yield
    finally:
        plain.encode = now


def without_checksums(store: Path) -> None:
    """Only to make fixtures: the small text files of a store as the first edition wrote them."""
    for path in [store / "CURRENT", *store.glob("gen-*/store.json")]:
        path.write_bytes(unsealed(path.read_bytes())[0])
