"""Roster: the coordinator of spare hosts, which runs beside worker 0, and every worker's link to
it.

A link of its own for few and small frames, so that no gradient stands before them. What is decided
is in protocol/membership.py; what a worker does when asked, in runtime/summation.py. Frames go out
in the order of the decisions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from roadtrain.errors import LostError, PeerError, WireError
from roadtrain.protocol.membership import AskRounds, Change, MembershipStateMachine, Spares
from roadtrain.runtime import frames as m
from roadtrain.runtime.connection import HostedSession, WorkerConnection
from roadtrain.transport.link import Link

STATE_LIMIT = 16 << 20  # bytes of a worker's rounds


class Control(HostedSession[WorkerConnection]):
    """Of one start of a job. `report`: what a person is told."""

    payloads = {m.STATE: STATE_LIMIT}

    def __init__(
        self, session: str, workers: int, spares: Spares, report: Callable[[str], None]
    ) -> None:
        super().__init__(workers)
        self.name, self.report = session, report
        self._machine = MembershipStateMachine(workers, spares)

    def new_connection(self, rank: int, link: Link) -> WorkerConnection:
        worker = super().new_connection(rank, link)
        if self._machine.asked is not None:
            self._say([worker], self._machine.asked)
        return worker

    def take(self, worker: WorkerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        match kind:
            case m.GONE:
                self.lost_reducer(*fields)
            case m.STATE:
                rounds = {
                    key: (last, bool(done)) for key, (last, done) in m.rounds(payload).items()
                }
                self._state(worker.rank, fields, rounds)
            case _:
                raise WireError(f"a frame of kind {kind} came to a coordinator")

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        """That a worker has gone is noticed by the reducers."""

    @property
    def spares(self) -> dict[str, int]:
        """Address -> number of its site, of those that are there."""
        with self.lock:
            return {address: reducer for reducer, (address, _) in self._machine.spares.items()}

    def lost_reducer(self, reducer: int, why: str) -> None:
        with self.lock:
            if reducer in self._machine.spares and reducer not in self._machine.lost:
                self.report(f"{why}: left out from now on")
            self._say_all(self._machine.gone(reducer))

    def offered(self, address: str, rate: float) -> None:
        with self.lock:
            self._say_all(self._machine.offered(address, rate))

    def _state(self, rank: int, fields: m.StateHeader, rounds: dict[int, tuple[int, bool]]) -> None:
        with self.lock:
            said = self._machine.state(rank, fields.number, rounds, fields.refused)
            for change in said:
                if isinstance(change, Change):
                    for _, address, _ in change.added:
                        self.report(f"spare host {address} sums from now on")
            self._say_all(said)

    def _say_all(self, said: Sequence[AskRounds | Change]) -> None:
        for one in said:
            self._say(self.everyone(), one)

    def _say(self, workers: Sequence[WorkerConnection], one: AskRounds | Change) -> None:
        if isinstance(one, AskRounds):
            frame = m.ASK, m.encode((one.number, one.added)), list[memoryview]()
        else:
            rounds = memoryview(m.encode(one.rounds))
            frame = m.CHANGE, m.encode((one.number, one.gone, one.added)), [rounds]
        for worker in workers:
            with suppress(PeerError):  # it has gone: its reducers' links say so
                worker.link.send(*frame)


class Delegate:
    """A worker's end: its Receiver. `dial` (new hosts -> those not reached) and `hold` (->
    rounds) when asked, then `change`; `failed` when the coordinator is lost."""

    def __init__(
        self,
        dial: Callable[[Spares], list[int]],
        hold: Callable[[], dict[int, tuple[int, bool]]],
        change: Callable[[Change], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._dial, self._hold, self._change, self._failed = dial, hold, change, failed
        self._link, self._lock = list[Link](), threading.Lock()
        # said before the link was known here
        self._early: list[tuple[int, bytes, Sequence[memoryview]]] = []

    def linked(self, link: Link) -> None:
        """Once. Raises PeerError."""
        with self._lock:
            self._link.append(link)
            for frame in self._early:
                link.send(*frame)

    def _say(self, kind: int, header: bytes, parts: Sequence[memoryview] = ()) -> None:
        """It may be asked, and spare hosts may die, before its link is known here."""
        with self._lock:
            if self._link:
                self._link[0].send(kind, header, parts)
            else:
                self._early.append((kind, header, parts))

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        match kind:
            case m.ASK:
                refused = self._dial(fields.added)
                rounds = {key: (last, int(done)) for key, (last, done) in self._hold().items()}
                parts = [memoryview(m.encode(rounds))]
                self._say(m.STATE, m.encode((fields.number, refused)), parts)
            case m.CHANGE:
                self._change(Change(fields.number, fields.gone, fields.added, m.rounds(payload)))
            case m.FAILED:
                self._failed(LostError(fields.words))
            case _:
                raise WireError(f"a frame of kind {kind} came from a coordinator")

    def gone(self, reducer: int, why: str) -> None:
        """Tells the coordinator."""
        try:
            self._say(m.GONE, m.encode((reducer, why)))
        except PeerError as error:
            self._failed(error)

    def lost(self, error: PeerError) -> None:
        self._failed(error)

    def close(self) -> None:
        for link in self._link:
            link.close()
