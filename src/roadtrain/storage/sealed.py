"""Small files that carry their own checksum: a body of text, then a line `xxh3 DIGEST`. A JSON
object stays one: its checksum is its first key (`sealed_json`).

Assumes: the file is written whole (storage/direct.replace_file). Does NOT know what the body says.
"""

from __future__ import annotations

import xxhash

_TAG = b"\nxxh3 "
_KEY = b'{"xxh3": "%s",'  # of the bytes that follow


def sealed(body: bytes) -> bytes:
    """`body` and the line that vouches for it. `body` itself has no such line."""
    assert _TAG not in body
    return body + _TAG + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def unsealed(content: bytes) -> bytes:
    """The body. Raises ValueError where the checksum is absent or does not match."""
    body, tag, digest = content.rpartition(_TAG)
    if not tag:
        raise ValueError("it has no checksum")
    if digest != xxhash.xxh3_64_hexdigest(body).encode() + b"\n":
        raise ValueError("its checksum does not match")
    return body


def sealed_json(body: bytes) -> bytes:
    """`body`, a JSON object that is not empty, with the key that vouches for it."""
    rest = body.removeprefix(b"{")
    return _KEY % xxhash.xxh3_64_hexdigest(rest).encode() + rest


def check_json(content: bytes) -> None:
    """Raises ValueError where the checksum does not match. An object without one passes."""
    rest = content[len(_KEY % bytes(16)) :]
    if content.startswith(_KEY[:9]) and content != sealed_json(b"{" + rest):
        raise ValueError("its checksum does not match")
