"""A link inside one process: the message goes straight to the receiver's `deliver`, which must not block.

Messages are Python objects; bulk bytes are named by them as memoryviews (`into`, `grad`) and passed on, not copied.
`send` keeps the order of messages and raises LostError once the link is closed. Links that carry frames are in wire/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from roadtrain.errors import LostError

Deliver = Callable[[Any], None]


class MessageLink(Protocol):
    peer: str  # for messages to people: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None: ...

    def close(self) -> None: ...


class DirectLink:
    def __init__(self, peer: str, deliver: Deliver) -> None:
        self.peer = peer
        self._deliver: Deliver | None = deliver

    def send(self, message: Any) -> None:
        if self._deliver is None:
            raise LostError(f"{self.peer} is closed")
        self._deliver(message)

    def close(self) -> None:
        self._deliver = None
