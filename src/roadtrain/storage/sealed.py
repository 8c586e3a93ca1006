"""Checksums of small text files, which end with a line `xxh3 DIGEST`. In JSON files, the checksum
is the value of the first key instead."""

from __future__ import annotations

import xxhash

_TAG = b"\nxxh3 "
_KEY = b'{"xxh3": "%s",'  # holds the checksum of all bytes after this text


def sealed(body: bytes) -> bytes:
    """Append the checksum line to `body`, which must not contain one yet."""
    assert _TAG not in body
    return body + _TAG + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def unsealed(content: bytes) -> bytes:
    """Return the body of a file. Raises ValueError if the checksum is missing or wrong."""
    body, tag, digest = content.rpartition(_TAG)
    if not tag:
        raise ValueError("the checksum is missing")
    if digest != xxhash.xxh3_64_hexdigest(body).encode() + b"\n":
        raise ValueError("the checksum does not match the content")
    return body


def sealed_json(body: bytes) -> bytes:
    """Insert the checksum as the first key into `body`, a JSON object that is not empty."""
    rest = body.removeprefix(b"{")
    return _KEY % xxhash.xxh3_64_hexdigest(rest).encode() + rest


def check_json(content: bytes) -> None:
    """Raise ValueError if the checksum of a JSON object is wrong. An object without a checksum is
    accepted."""
    rest = content[len(_KEY % bytes(16)) :]
    if content.startswith(_KEY[:9]) and content != sealed_json(b"{" + rest):
        raise ValueError("the checksum does not match the content")
