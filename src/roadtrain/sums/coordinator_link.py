"""CoordinatorLink: a worker's connection to the coordinator (coordinator.py)."""

from __future__ import annotations

import threading
from typing import Any

from roadtrain.errors import LostError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.sums import sum_frames
from roadtrain.sums.agreement import Agreement
from roadtrain.sums.protocol.membership import Change
from roadtrain.sums.worker_sums import WorkerSums
from roadtrain.transport.link import Link


class CoordinatorLink:
    """The handler of the frames on a worker's link to the coordinator. `agreement` and `sums` must
    be set before `linked` is called; `sums` stays None if the worker does not use spare hosts."""

    def __init__(self) -> None:
        self.agreement: Agreement
        self.sums: WorkerSums | None = None
        self._link: Link | None = None
        self._early: list[tuple[int, bytes, bytes]] = []  # frames to send once `_link` is set
        self._closed = False
        self._lock = threading.Lock()  # keeps frames in order

    def linked(self, link: Link) -> None:
        """Set the link, and send the frames that were passed to `say` earlier. Called once. Raises
        PeerError."""
        with self._lock:
            self._link = link
            for kind, header, payload in self._early:
                link.send(kind, header, [memoryview(payload)])

    def say(self, kind: int, fields: tuple[Any, ...], payload: bytes = b"") -> None:
        """Send a frame to the coordinator, or keep it until `linked` is called. Raises
        PeerError."""
        header = m.encode(fields)
        with self._lock:
            if self._link is None:
                self._early.append((kind, header, payload))
            else:
                self._link.send(kind, header, [memoryview(payload)])

    def reducer_lost(self, reducer: int, why: str) -> None:
        try:
            self.say(sum_frames.REDUCER_LOST, (reducer, why))
        except PeerError as error:
            self.lost(error)

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != sum_frames.CHANGE:
            raise WireError(f"coordinator frame {kind} has a payload of {nbytes} bytes, expected 0")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields, sums = m.header(kind, header), self.sums
        match kind:
            case sum_frames.ASK if sums is not None:
                refused = sums.dial(fields.added)
                rounds = {key: (last, int(done)) for key, (last, done) in sums.hold().items()}
                self.say(sum_frames.STATE, (fields.number, refused), m.encode(rounds))
            case sum_frames.CHANGE if sums is not None:
                sums.change(
                    Change(fields.number, fields.removed, fields.added, sum_frames.rounds(payload))
                )
            case m.FAILED:
                error = LostError(fields.words)
                self.agreement.fail(error)
                if sums is not None:
                    sums.fail(error)
            case sum_frames.MISMATCH | sum_frames.AGREED | sum_frames.ASK_BEGUN:
                self.agreement.take(kind, fields)
            case _:
                raise WireError(f"a coordinator sent an unexpected frame of kind {kind}")

    def lost(self, error: PeerError) -> None:
        """Handle the loss of the link. Sums that use spare hosts fail. Other sums on which the
        workers have agreed can still finish."""
        if not self._closed:
            self.agreement.lost(error)
            if self.sums is not None:
                self.sums.fail(error)

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close()
