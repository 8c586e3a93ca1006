"""Small files that carry their own checksum: a body of text, then a line `xxh3 DIGEST`.

Assumes: the file is written whole (store/direct.replace_file). Does NOT know what the body says.
"""

from __future__ import annotations

import xxhash

_TAG = b"\nxxh3 "


def sealed(body: bytes) -> bytes:
    """`body` and the line that vouches for it. `body` itself has no such line."""
    assert _TAG not in body
    return body + _TAG + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def unsealed(content: bytes) -> tuple[bytes, bool]:
    """(the body, whether a checksum vouches for it): files of the first edition have none.
    Raises ValueError where the checksum does not match."""
    body, tag, digest = content.rpartition(_TAG)
    if not tag:
        return content, False
    if digest != xxhash.xxh3_64_hexdigest(body).encode() + b"\n":
        raise ValueError("its checksum does not match")
    return body, True
