"""Parse addresses, and read the job's token and the paths of TLS files."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path

from roadtrain.errors import ConfigError, LostError
from roadtrain.transport.handshake import Common
from roadtrain.transport.tcp import MIN_TOKEN, Address, TcpOptions, Tls
from roadtrain.units import KIB

# a name or an IPv4 address, or an IPv6 address in brackets
ADDRESS = re.compile(r"(\[(?P<six>[^\s\[\]]+)\]|(?P<host>[^\s\[\]:/]+)):(?P<port>[0-9]{1,5})")
MAX_PORT = 65535
MAX_TOKEN = 4 * KIB  # bytes


def address_of(text: str) -> Address:
    """Parse an address such as "10.0.0.3:7000" into (host, port). Raises ConfigError if `text` is
    not HOST:PORT."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > MAX_PORT:
        raise ConfigError(
            f"{text!r} is not an address: it needs a host and a port of at most {MAX_PORT}",
            hint="write HOST:PORT, such as 10.0.0.3:7000 or [fd00::3]:7000",
        )
    return found["six"] or found["host"], int(found["port"])


def own_address(to: Address) -> str:
    """Return the IP address of this host that is the source address of packets to the host `to`.
    Raises LostError if this host has no route to `to`."""
    try:
        family, kind, *_, where = socket.getaddrinfo(*to, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LostError(f"no route to {to[0]}:{to[1]}: {error}") from error


def local_options(options: TcpOptions) -> Common:
    """Return options for a link between processes of one host."""
    return Common(
        frame_limit=options.frame_limit,
        checksums=options.checksums,
        close_s=options.close_s,
        retry_s=(options.retry_s or 0.0) + 30,
    )


def token_of(path: bytes | str | Path | None) -> bytes | None:
    """Read the job's token from a file; return `path` if it is a token or None. Raises ConfigError
    if the file is unreadable, if other users have access to it, or if the token is too short or too
    long."""
    if isinstance(path, bytes | None):
        return path
    try:
        with open(path, "rb") as file:
            mode, token = os.fstat(file.fileno()).st_mode & 0o777, file.read(MAX_TOKEN + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"other users can read or change the token in {path} (mode {mode:03o}, at most 600 is"
            " allowed)",
            hint=f"chmod 600 {path}",
        )
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ConfigError(
            f"the token in {path} must have {MIN_TOKEN} to {MAX_TOKEN} bytes, but has {len(token)}",
            hint=f"(umask 077; head -c 32 /dev/urandom | base64 > {path}) creates a new token",
        )
    return token


def write_token(path: Path, token: bytes | None = None) -> None:
    """Write a token to a new file that only its owner can read. If `token` is None, the token is
    random."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(token or secrets.token_hex().encode())


def tls_of(cert: str | None, key: str | None, ca: str | None) -> Tls | None:
    """Return a Tls made from the paths of PEM files, or None if no path is given. Raises
    ConfigError if a file is unreadable, or if `key` is given without `cert`."""
    if not (cert or key or ca):
        return None
    if key and not cert:
        raise ConfigError(f"TLS: the key {key} needs its certificate", hint="pass both")
    for path in filter(None, (cert, key, ca)):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"TLS: {path} cannot be read",
                hint="pass PEM files: a certificate, its key, the authority's certificate",
            )
    ours, secret, theirs = (None if path is None else Path(path) for path in (cert, key, ca))
    return Tls(ours, secret, theirs)
