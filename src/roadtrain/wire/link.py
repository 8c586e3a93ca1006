"""Link: how messages travel between a worker and a server. One page, two methods and a name.

A link is made with the function that takes what arrives; `send` never waits for the other side's work, keeps the order
of messages, and raises LostError once the peer is gone. Bulk bytes are named by the messages as memoryviews (`into`,
`grad`): a link that crosses processes copies them, one inside a process passes them on.

Not here: what messages mean (flow/ops.py), who retries (nobody: a lost peer is an error with a name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Deliver = Callable[[Any], None]


class Link(Protocol):
    peer: str  # for messages to people: "server 0 (/mnt/ssd0/run)"

    def send(self, message: Any) -> None: ...

    def close(self) -> None: ...
