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

from roadtrain.errors import BusyError, PeerError, WireError
from roadtrain.protocol.membership import AskRounds, Change, MembershipStateMachine, Spares
from roadtrain.runtime import frames as m
from roadtrain.transport.link import Link

STATE_LIMIT = 16 << 20  # bytes of a worker's rounds


class _MembershipConnection:
    """One worker's place: the Receiver of its link."""

    def __init__(self, control: Control, rank: int, link: Link) -> None:
        self.control, self.rank, self.link = control, rank, link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != m.STATE or nbytes > STATE_LIMIT:
            raise WireError(f"a frame of kind {kind} with {nbytes} bytes came to a coordinator")
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        if kind == m.GONE:
            self.control.gone(*fields)
        elif kind == m.STATE:
            rounds = {key: (last, bool(done)) for key, (last, done) in m.rounds(payload).items()}
            self.control.state(self.rank, fields[0], fields[1], rounds)
        else:
            raise WireError(f"a frame of kind {kind} came to a coordinator")

    def lost(self, error: PeerError) -> None:
        """That a worker has gone is noticed by the reducers."""


class Control:
    """Of one start of a job. `report`: what a person is told."""

    def __init__(
        self, session: str, workers: int, spares: Spares, report: Callable[[str], None]
    ) -> None:
        self.session, self.report = session, report
        self._machine, self._lock = MembershipStateMachine(workers, spares), threading.Lock()
        self._seats: dict[int, _MembershipConnection] = {}

    def join(self, session: str, rank: int, link: Link) -> _MembershipConnection:
        with self._lock:
            if (
                session != self.session
                or not 0 <= rank < self._machine.workers
                or rank in self._seats
            ):
                raise BusyError("busy with another start of this job")
            seat = self._seats[rank] = _MembershipConnection(self, rank, link)
            if self._machine.asked is not None:
                self._say([seat], self._machine.asked)
        return seat

    @property
    def spares(self) -> dict[str, int]:
        """Address -> number of its site, of those that are there."""
        with self._lock:
            return {address: reducer for reducer, (address, _) in self._machine.spares.items()}

    def gone(self, reducer: int, why: str) -> None:
        with self._lock:
            if reducer in self._machine.spares and reducer not in self._machine.lost:
                self.report(f"{why}: left out from now on")
            self._say_all(self._machine.gone(reducer))

    def offered(self, address: str, rate: float) -> None:
        with self._lock:
            self._say_all(self._machine.offered(address, rate))

    def state(
        self, rank: int, number: int, refused: Sequence[int], rounds: dict[int, tuple[int, bool]]
    ) -> None:
        with self._lock:
            for change in (said := self._machine.state(rank, number, rounds, refused)):
                if isinstance(change, Change):
                    for _, address, _ in change.added:
                        self.report(f"spare host {address} sums from now on")
            self._say_all(said)

    def _say_all(self, said: Sequence[AskRounds | Change]) -> None:
        for one in said:
            self._say(list(self._seats.values()), one)

    def _say(self, seats: Sequence[_MembershipConnection], one: AskRounds | Change) -> None:
        if isinstance(one, AskRounds):
            frame = m.ASK, m.encode((one.number, one.added)), list[memoryview]()
        else:
            rounds = memoryview(m.encode(one.rounds))
            frame = m.CHANGE, m.encode((one.number, one.gone, one.added)), [rounds]
        for seat in seats:
            with suppress(PeerError):  # it has gone: its reducers' links say so
                seat.link.send(*frame)


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
        if kind == m.ASK:
            number, added = fields
            refused = self._dial(added)
            rounds = {key: (last, int(done)) for key, (last, done) in self._hold().items()}
            self._say(m.STATE, m.encode((number, refused)), [memoryview(m.encode(rounds))])
        elif kind == m.CHANGE:
            self._change(Change(fields[0], fields[1], fields[2], m.rounds(payload)))
        else:
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
