"""How a server is reached: its address, the job's token, and again while it is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from roadtrain.errors import ConfigError, WireError
from roadtrain.node import messages as m
from roadtrain.wire.link import Link
from roadtrain.wire.tcp import Address


def address_of(text: str) -> Address:
    """HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address", hint="HOST:PORT, as 10.0.0.3:7000")
    return host.strip("[]"), int(port)


def token_of(path: str | None) -> bytes | None:
    """The job's token: the content of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}") from error


def dial(connect: Callable[[], Link], retry_s: float) -> Link:
    """Tries again for `retry_s` while the server is busy with workers that may be leaving."""
    until = time.monotonic() + retry_s
    while True:
        try:
            return connect()
        except WireError as error:
            if m.BUSY not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.2)
