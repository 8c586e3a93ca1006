"""Coordinator: runs beside worker 0 and has one link from every worker of a start, for few and
small frames, so that no gradient stands before them.

    worker: Say Stall Has --> sums/protocol/agreement.py  --> Agreed Asked Differ Failed
    worker: Gone State    --> sums/protocol/membership.py --> Ask Change

It decides whether all mean the same by an operation, and which spare hosts sum. That a worker has
gone, it learns from the end of that worker's link, whose other end is a CoordinatorLink
(coordinator_link.py). Frames go out in the order of the decisions. Does NOT sum, and does NOT start
workers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from roadtrain.errors import PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import HostedSession, WorkerConnection
from roadtrain.sums import sum_frames
from roadtrain.sums.protocol.agreement import (
    Agreed,
    AgreementStateMachine,
    AskWhetherBegun,
    Differ,
    Gone,
    Operation,
    Said,
)
from roadtrain.sums.protocol.membership import (
    AskRounds,
    Change,
    MembershipAction,
    MembershipStateMachine,
    Spares,
)
from roadtrain.transport.link import Link

TO_COORDINATOR = "coordinator"  # in a greeting, instead of a rule
STATE_LIMIT = 16 << 20  # bytes of a worker's rounds
STALL_LIMIT = 4 << 20  # bytes of what a worker waits for


class SumGroup:
    """Workers (`ranks`) that sum with each other, and the spare hosts that sum for them."""

    def __init__(self, coordinator: Coordinator, ranks: Sequence[int], spares: Spares) -> None:
        self.coordinator, self.ranks = coordinator, ranks
        self.machine = MembershipStateMachine(len(ranks), spares)
        self._lock = coordinator.lock

    @property
    def spares(self) -> dict[str, int]:
        """Address -> number of its reducer, of the spare hosts that are there."""
        with self._lock:
            return {address: number for number, (address, _) in self.machine.spares.items()}

    def lost_reducer(self, reducer: int, why: str) -> None:
        with self._lock:
            if reducer in self.machine.spares and reducer not in self.machine.lost:
                self.coordinator.report(f"{why}: left out from now on")
            self._say_all(self.machine.gone(reducer))

    def offered(self, address: str, rate: float) -> None:
        with self._lock:
            self._say_all(self.machine.offered(address, rate))

    def state(self, rank: int, fields: sum_frames.StateHeader, rounds: sum_frames.Rounds) -> None:
        begun = {key: (last, bool(done)) for key, (last, done) in rounds.items()}
        with self._lock:
            said = self.machine.state(rank, fields.number, begun, fields.refused)
            for change in said:
                if isinstance(change, Change):
                    for _, address, _ in change.added:
                        self.coordinator.report(f"spare host {address} sums from now on")
            self._say_all(said)

    def _say_all(self, said: Sequence[MembershipAction]) -> None:
        for one in said:
            self.coordinator.send(self.ranks, *_frame(one))


def _frame(said: MembershipAction) -> tuple[int, tuple[Any, ...], bytes]:
    if isinstance(said, AskRounds):
        return sum_frames.ASK, said, b""
    return sum_frames.CHANGE, (said.number, said.gone, said.added), m.encode(said.rounds)


class Coordinator(HostedSession[WorkerConnection]):
    """Of one start of a job. `waits`: as AgreementStateMachine has it. `groups`: ranks that sum
    with each other and go round spare hosts; a worker is in one of them at most."""

    payloads = {sum_frames.STATE: STATE_LIMIT, sum_frames.STALL: STALL_LIMIT}

    def __init__(
        self,
        session: str,
        workers: int,
        waits: bool,
        groups: Sequence[Sequence[int]] = (),
        spares: Spares = (),
        report: Callable[[str], None] = print,
    ) -> None:
        super().__init__(workers)
        self.name, self.report = session, report
        self.agreement = AgreementStateMachine(workers, waits)
        self.groups = [SumGroup(self, ranks, spares) for ranks in groups]
        self._group_of = {rank: group for group in self.groups for rank in group.ranks}

    def new_connection(self, rank: int, link: Link) -> WorkerConnection:
        worker = super().new_connection(rank, link)
        group = self._group_of.get(rank)
        if group is not None and group.machine.asked is not None:
            self._send(worker, *_frame(group.machine.asked))
        return worker

    def take(self, worker: WorkerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        if kind in (sum_frames.GONE, sum_frames.STATE):
            group = self._group_of.get(worker.rank)
            if group is None:
                raise WireError(f"worker {worker.rank} has no spare hosts and spoke of them")
            if kind == sum_frames.GONE:
                group.lost_reducer(*fields)
            else:
                group.state(worker.rank, fields, sum_frames.rounds(payload))
            return
        with self.lock:
            self._tell(self._decided(worker.rank, kind, fields, payload))

    def _decided(self, rank: int, kind: int, fields: Any, payload: memoryview) -> Sequence[Said]:
        match kind:
            case sum_frames.SAY:
                epoch, *operation = fields
                return self.agreement.say(rank, epoch, Operation(*operation))
            case sum_frames.STALL:
                pending, blocked = sum_frames.stalled(payload)
                waiting = [Operation(*one) for one in pending]
                mine = Operation(*blocked[0]) if blocked else None
                return self.agreement.stall(rank, fields.epoch, waiting, mine)
            case sum_frames.HAS:
                epoch, place, begun, blocked = fields
                return self.agreement.has(
                    rank, epoch, place, begun, blocked[0] if blocked else None
                )
        raise WireError(f"a frame of kind {kind} came to a coordinator")

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        with self.lock:
            self._tell(self.agreement.left(rank, str(error).splitlines()[0]))

    def _tell(self, said: Sequence[Said]) -> None:
        epoch, everyone = self.agreement.epoch, range(self.workers)
        for one in said:
            match one:
                case Agreed(operation, to):
                    fields = epoch, operation.identity, operation.use, operation.signature
                    self.send(everyone if to is None else [to], sum_frames.AGREED, fields)
                case AskWhetherBegun(to, place):
                    self.send([to], sum_frames.ASKED, (epoch, place))
                case Differ(number, words):
                    self.send(everyone, sum_frames.DIFFER, (number, words))
                case Gone(words, to):
                    self.send(everyone if to is None else [to], m.FAILED, ("LostError", words))

    def send(
        self, ranks: Sequence[int], kind: int, fields: tuple[Any, ...], payload: bytes = b""
    ) -> None:
        """To those of them that are here."""
        for worker in self.everyone():
            if worker.rank in ranks:
                self._send(worker, kind, fields, payload)

    @staticmethod
    def _send(
        worker: WorkerConnection, kind: int, fields: tuple[Any, ...], payload: bytes = b""
    ) -> None:
        with suppress(PeerError):  # that it has gone is noticed
            worker.link.send(kind, m.encode(fields), [memoryview(payload)] if payload else [])

    def close(self, wait_s: float) -> None:
        """Waits so long for the workers to leave by themselves."""
        with self.lock:
            self.lock.wait_for(lambda: self.connections.keys() <= self.lost_ranks, wait_s)
        for worker in self.everyone():
            worker.link.close()
