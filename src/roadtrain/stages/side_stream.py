"""SideStream: the device's work of another thread, in order with that of the thread that computes.

On the host all of it is nothing: there what has ended is there. On an accelerator the thread of
`running` has a stream of its own; marks say from when on what it needs is made, and from when on
what it makes may be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        # number -> what the other thread made is there after this
        self.marks: dict[int, torch.Event] = {}

    @property
    def running(self) -> contextlib.AbstractContextManager[object]:
        """In which the other thread runs."""
        return contextlib.nullcontext() if self.stream is None else self.stream

    def mark(self) -> torch.Event | None:
        """Of the computing thread: what it has made so far."""
        if self.stream is None:
            return None
        return torch.accelerator.current_stream(self.stream.device).record_event()

    def after(self, mark: torch.Event | None) -> None:
        """Of the other thread: what follows needs what was marked."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def leave_mark(self, number: int) -> None:
        """Of the other thread: `number` is made, once what was begun has run."""
        if self.stream is not None:
            self.marks[number] = self.stream.record_event()

    def wait_for(self, numbers: Collection[int]) -> None:
        """Of the computing thread: what follows needs these."""
        if self.stream is None:
            return
        for number in numbers:
            if (mark := self.marks.pop(number, None)) is not None:
                torch.accelerator.current_stream(self.stream.device).wait_event(mark)

    def join(self) -> None:
        """Of the computing thread: what follows needs all that the other thread began."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.stream.device).wait_stream(self.stream)
