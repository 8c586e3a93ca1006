"""A condition of one process, which its forked children cannot use."""

from __future__ import annotations

import os
import threading
from typing import Any

from roadtrain.streaming.released import in_child


class ProcessLock(threading.Condition):
    """A condition that can only be used in the process that created it, not in a forked child.

    `interrupted` is True if Ctrl-C has stopped a change of the guarded state halfway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maker = os.getpid()
        self.waiting = self.interrupted = False

    def check_process(self) -> None:
        """Raise LoopError in a forked child."""
        if os.getpid() != self.maker:
            raise in_child(self.maker)

    def __enter__(self) -> bool:
        self.check_process()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self.interrupted |= kind is KeyboardInterrupt and not self.waiting
        self.waiting = False
        super().__exit__(kind, *rest)
