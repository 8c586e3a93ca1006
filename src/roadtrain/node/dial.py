"""How a server is reached: its address and the job's token."""

from __future__ import annotations

from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.wire import shm
from roadtrain.wire.tcp import Address, Options


def address_of(text: str) -> Address:
    """HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address", hint="HOST:PORT, as 10.0.0.3:7000")
    return host.strip("[]"), int(port)


def local_options(options: Options) -> shm.Options:
    """Of a link inside a host, as patient as `options`."""
    return shm.Options(frame_limit=options.frame_limit, close_s=options.close_s, retry_s=(options.retry_s or 0.0) + 30)


def token_of(path: str | None) -> bytes | None:
    """The job's token: the content of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}") from error
