"""A link inside one process: the message goes straight to the receiver's `deliver`, which must not block."""

from __future__ import annotations

from typing import Any

from roadtrain.errors import LostError
from roadtrain.wire.link import Deliver


class LocalLink:
    def __init__(self, peer: str, deliver: Deliver) -> None:
        self.peer = peer
        self._deliver: Deliver | None = deliver

    def send(self, message: Any) -> None:
        if self._deliver is None:
            raise LostError(f"{self.peer} is closed")
        self._deliver(message)

    def close(self) -> None:
        self._deliver = None
