"""A thread of this process on a host of the lab; sockets and programs that it creates are on that
host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class HostThread:
    def __init__(self, net: Path | None) -> None:
        """net: File of a network namespace. None: A new namespace, which ends with the thread."""
        self._thread = ThreadPoolExecutor(1)
        self.do(_enter, net)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._thread.submit(function, *arguments).result(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


def _enter(net: Path | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if net is None:
        failed = libc.unshare(NEW_NETWORK)
    else:
        with net.open() as file:
            failed = libc.setns(file.fileno(), NEW_NETWORK)
    if failed:
        raise OSError(ctypes.get_errno(), "no network namespace")
