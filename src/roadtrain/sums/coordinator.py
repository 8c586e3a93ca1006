"""Coordinator: runs in the process of worker 0, checks that all workers begin the same operations,
and decides which spare hosts sum. Does NOT restart workers.

    worker: Say Stall Has     --> sums/protocol/agreement.py  --> Agreed AskBegun Mismatch Failed
    worker: ReducerLost State --> sums/protocol/membership.py --> Ask Change

A worker whose link to the coordinator ends counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roadtrain.errors import PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.connection import HostedSession, WorkerConnection
from roadtrain.sums import sum_frames
from roadtrain.sums.protocol.agreement import (
    Agreed,
    AgreementAction,
    AgreementStateMachine,
    AskWhetherBegun,
    Mismatch,
    Operation,
    WorkerLost,
)
from roadtrain.sums.protocol.membership import (
    AskRounds,
    Change,
    MembershipAction,
    MembershipStateMachine,
    Spares,
)
from roadtrain.transport.link import Link

TO_COORDINATOR = "coordinator"  # in a greeting, in place of a rule
STATE_LIMIT = 16 << 20  # bytes of the payload of a State
STALL_LIMIT = 4 << 20  # bytes of the payload of a Stall


class SumGroup:
    """A group of workers (`ranks`) that sum with each other, and the spare hosts of this group."""

    def __init__(self, coordinator: Coordinator, ranks: Sequence[int], spares: Spares) -> None:
        self.coordinator, self.ranks = coordinator, ranks
        self.machine = MembershipStateMachine(len(ranks), spares)
        self._lock = coordinator.lock

    @property
    def spares(self) -> dict[str, int]:
        """The spare hosts in use: the address of each host -> the number of the host's reducer."""
        with self._lock:
            return {address: number for number, (address, _) in self.machine.spares.items()}

    def lost_reducer(self, reducer: int, why: str) -> None:
        with self._lock:
            if reducer in self.machine.spares and reducer not in self.machine.lost:
                self.coordinator.report(f"{why}: not used any more")
            self._carry_out(self.machine.remove(reducer))

    def offered(self, address: str, rate: float) -> None:
        with self._lock:
            self._carry_out(self.machine.offered(address, rate))

    def state(self, rank: int, fields: sum_frames.StateHeader, rounds: sum_frames.Rounds) -> None:
        begun = {key: (last, bool(done)) for key, (last, done) in rounds.items()}
        with self._lock:
            actions = self.machine.state(rank, fields.number, begun, fields.refused)
            for change in actions:
                if isinstance(change, Change):
                    for _, address, _ in change.added:
                        self.coordinator.report(f"spare host {address} begins to sum")
            self._carry_out(actions)

    def _carry_out(self, actions: Sequence[MembershipAction]) -> None:
        for action in actions:
            self.coordinator.send(self.ranks, *_frame(action))


def _frame(action: MembershipAction) -> tuple[int, tuple[Any, ...], bytes]:
    if isinstance(action, AskRounds):
        return sum_frames.ASK, action, b""
    fields = action.number, action.removed, action.added
    return sum_frames.CHANGE, fields, m.encode(action.rounds)


class Coordinator(HostedSession[WorkerConnection]):
    """The coordinator of one run of a job.

    Args:
        waits: Whether the workers wait for each other in every operation (False in asynchronous
            training).
        groups: The groups that use spare hosts. Each group is a list of ranks.
        spares: The spare hosts that are used at the start.
    """

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
        if group is not None and group.machine.query is not None:
            worker.say(*_frame(group.machine.query))
        return worker

    def take(self, worker: WorkerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        if kind in (sum_frames.REDUCER_LOST, sum_frames.STATE):
            group = self._group_of.get(worker.rank)
            if group is None:
                raise WireError(f"worker {worker.rank} uses no spare hosts, but sent frame {kind}")
            if kind == sum_frames.REDUCER_LOST:
                group.lost_reducer(*fields)
            else:
                group.state(worker.rank, fields, sum_frames.rounds(payload))
            return
        with self.lock:
            self._carry_out(self._decide(worker.rank, kind, fields, payload))

    def _decide(
        self, rank: int, kind: int, fields: Any, payload: memoryview
    ) -> Sequence[AgreementAction]:
        match kind:
            case sum_frames.SAY:
                epoch, *operation = fields
                return self.agreement.say(rank, epoch, Operation(*operation))
            case sum_frames.STALL:
                pending, blocked = sum_frames.stalled(payload)
                waiting = [Operation(*operation) for operation in pending]
                mine = Operation(*blocked[0]) if blocked else None
                return self.agreement.stall(rank, fields.epoch, waiting, mine)
            case sum_frames.HAS:
                epoch, place, begun, blocked = fields
                return self.agreement.has(
                    rank, epoch, place, begun, blocked[0] if blocked else None
                )
        raise WireError(f"a coordinator received an unexpected frame of kind {kind}")

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        with self.lock:
            self._carry_out(self.agreement.left(rank, str(error).splitlines()[0]))

    def _carry_out(self, actions: Sequence[AgreementAction]) -> None:
        epoch, everyone = self.agreement.epoch, range(self.workers)
        for action in actions:
            match action:
                case Agreed(operation, to):
                    fields = epoch, operation.identity, operation.use, operation.signature
                    self.send(everyone if to is None else [to], sum_frames.AGREED, fields)
                case AskWhetherBegun(to, place):
                    self.send([to], sum_frames.ASK_BEGUN, (epoch, place))
                case Mismatch(number, words):
                    self.send(everyone, sum_frames.MISMATCH, (number, words))
                case WorkerLost(words, to):
                    self.send(everyone if to is None else [to], m.FAILED, ("LostError", words))

    def send(
        self, ranks: Sequence[int], kind: int, fields: tuple[Any, ...], payload: bytes = b""
    ) -> None:
        """Send a frame to all workers in `ranks` that are connected at the moment."""
        for worker in self.everyone():
            if worker.rank in ranks:
                worker.say(kind, fields, payload)

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for the workers to leave. Then close all links."""
        with self.lock:
            self.lock.wait_for(lambda: self.connections.keys() <= self.lost_ranks, wait_s)
        for worker in self.everyone():
            worker.link.close()
