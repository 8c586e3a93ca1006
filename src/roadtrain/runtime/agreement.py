"""Agreement: every worker's side of what protocol/agreement.py decides, and the coordinator's
beside worker 0.

    ticket = agreement.begin("gradient of x", "fp32 [4, 4]")
    agreement.run(ticket, ready, dropped)     ready: at once, where all have agreed about that
                                              before
    agreement.done(ticket)

What is known costs no message. Links of their own, for few and small frames. A thread looks at what
waits: after a second it says so, after the deadline it ends all (Rule 5). Assumes that `dropped`
returns soon. Does NOT sum.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import msgspec

from roadtrain.errors import DeadlineError, DifferError, LostError, PeerError, WireError
from roadtrain.protocol.agreement import (
    Agreed,
    AgreementStateMachine,
    AskWhetherBegun,
    Differ,
    Gone,
    Operation,
    Said,
)
from roadtrain.runtime import frames as m
from roadtrain.runtime.connection import HostedSession, WorkerConnection
from roadtrain.transport.link import Link

HELLO = "agree"  # instead of a rule
STALL_S, LOOK_S = 1.0, 0.25  # of waiting, before it is said; between two looks
GRACE_S = 1.0  # for what all have begun to end, once a verdict has come
MOST = 256  # operations in one word of who waits
TEXT = 1000  # letters of an identity or a signature that are told
WORDS_LIMIT = 1 << 22  # bytes
HINT = "every worker runs the same program over the same model"


def short(text: str) -> str:
    """Other texts stay other ones."""
    if len(text) <= TEXT:
        return text
    return f"{text[:TEXT]}... {blake2b(text.encode(), digest_size=8).hexdigest()}"


class AgreementCoordinator(HostedSession[WorkerConnection]):
    """Of one start of a job."""

    payloads = {m.STALL: WORDS_LIMIT}

    def __init__(self, session: str, workers: int, waits: bool) -> None:
        super().__init__(workers)
        self.name, self._machine = session, AgreementStateMachine(workers, waits)

    def take(self, worker: WorkerConnection, kind: int, fields: Any, payload: memoryview) -> None:
        with self.lock:
            self._tell(self._decided(worker.rank, kind, fields, payload))

    def _decided(self, rank: int, kind: int, fields: Any, payload: memoryview) -> Sequence[Said]:
        match kind:
            case m.SAY:
                epoch, *operation = fields
                return self._machine.say(rank, epoch, Operation(*operation))
            case m.STALL:
                pending, blocked = m.stalled(payload)
                waiting = [Operation(*one) for one in pending]
                mine = Operation(*blocked[0]) if blocked else None
                return self._machine.stall(rank, fields.epoch, waiting, mine)
            case m.HAS:
                epoch, place, begun, blocked = fields
                return self._machine.has(rank, epoch, place, begun, blocked[0] if blocked else None)
        raise WireError(f"a frame of kind {kind} came to who sees that workers agree")

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        with self.lock:
            self._tell(self._machine.left(rank, str(error).splitlines()[0]))

    def _tell(self, said: Sequence[Said]) -> None:
        epoch = self._machine.epoch
        for one in said:
            match one:
                case Agreed(operation, to):
                    self._send(
                        to,
                        m.AGREED,
                        (epoch, operation.identity, operation.use, operation.signature),
                    )
                case AskWhetherBegun(to, place):
                    self._send(to, m.ASKED, (epoch, place))
                case Differ(number, words):
                    self._send(None, m.DIFFER, (number, words))
                case Gone(words, to):
                    self._send(to, m.FAILED, ("LostError", words))

    def _send(self, to: int | None, kind: int, fields: tuple[Any, ...]) -> None:
        for worker in self.everyone():
            if to in (None, worker.rank):
                with suppress(PeerError):  # that it has gone is noticed
                    worker.link.send(kind, m.encode(fields))

    def close(self, wait_s: float) -> None:
        """Waits so long for the workers to leave by themselves."""
        with self.lock:
            self.lock.wait_for(lambda: self.connections.keys() <= self.gone, wait_s)
        for worker in self.everyone():
            worker.link.close()


class OperationTicket:
    """Of one operation under way here. `error`: why it is given up."""

    def __init__(self, operation: Operation, epoch: int) -> None:
        self.operation, self.epoch, self.began = operation, epoch, time.monotonic()
        self.agreed = threading.Event()  # or given up
        self.error: BaseException | None = None
        self._ready: Callable[[], None] | None = None
        self._dropped: Callable[[BaseException], None] | None = None


class Agreement:
    """A worker's end: the Receiver of its link to the coordinator. `waits`: as the state machine
    has it. Every program here meets a disagreement once: in a wait for what was given up, else in
    what it begins next.

    Invariants, under `order`: an open ticket is of this epoch; one with `_ready` is not agreed."""

    def __init__(self, rank: int, workers: int, waits: bool, deadline_s: float) -> None:
        self.rank, self.workers, self._waits, self._deadline_s = rank, workers, waits, deadline_s
        self.order = threading.RLock()  # over what is begun, and a new epoch
        self.epoch = 0
        self._open: dict[int, OperationTicket] = {}
        self._counts: Counter[str] = Counter()  # operations begun in this epoch, by identity
        self._known: set[tuple[str, str]] = set()  # identity, signature: all have agreed
        self._threads: dict[int, OperationTicket] = {}  # that wait -> for what
        self._begun = 0.0  # when the last operation was
        # the program here has not met it yet: what it begins is given up, too
        self._untold: DifferError | None = None
        self._given_up = False  # something was, of which it will hear
        # A verdict that waits, until when: all may have begun what is agreed here, and the others
        # may have ended it.
        self._verdict: tuple[float, tuple[int, str]] | None = None
        self._error: BaseException | None = None
        self._link: Link | None = None
        self._closed, self._watcher = threading.Event(), threading.Thread()

    def leads(self, give_up: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Before all else. `give_up`: all sums that are under way, before their `dropped` are
        called; `failed`: of what ends all."""
        self._give_up, self._failed = give_up, failed

    def linked(self, link: Link) -> None:
        """Once, where there are several workers."""
        self._link = link
        self._watcher = threading.Thread(target=self._watch, name="agreement", daemon=True)
        self._watcher.start()

    def begin(self, identity: str, signature: str, each: bool = False) -> OperationTicket:
        """Raises DifferError, once, where the others have disagreed while nothing was under way
        here; what has ended all."""
        with self.order:
            if self._error is not None:
                raise self._error
            identity = short(identity)
            if self._untold is not None:
                error = self._untold
                if not self._given_up:
                    self.told()
                    raise error
                return self._stillborn(Operation(identity, -1, signature, each), error)
            operation = Operation(identity, self._counts[identity], short(signature), each)
            self._counts[identity] += 1
            ticket = OperationTicket(operation, self.epoch)
            self._begun = ticket.began
            known = self._link is None or (
                not each and (identity, operation.signature) in self._known
            )
            if not known:
                self._say(m.SAY, (self.epoch, identity, operation.use, operation.signature, each))
            self._open[id(ticket)] = ticket
            if known or not (self._waits or each):
                self._known.add((identity, operation.signature))
                ticket.agreed.set()
        return ticket

    def _stillborn(self, operation: Operation, error: BaseException) -> OperationTicket:
        ticket = OperationTicket(operation, self.epoch)
        self._drop(ticket, error)
        return ticket

    def told(self) -> None:
        """The program here knows of the last disagreement: what it begins is of the new epoch."""
        with self.order:
            self._untold, self._given_up = None, False

    def program_goes_on(self) -> None:
        """It has begun anew, so it knows; unless nothing of it has been given up yet."""
        if self._given_up:
            self.told()

    def run(
        self,
        ticket: OperationTicket,
        ready: Callable[[], None],
        dropped: Callable[[BaseException], None],
    ) -> None:
        """`ready` as soon as all agree, inside `order`; or `dropped`, also after `ready` while
        the ticket is open."""
        with self.order:
            ticket._dropped = dropped
            if ticket.error is None and not ticket.agreed.is_set():
                ticket._ready = ready
            elif ticket.error is None:
                self._run(ticket, ready)
            else:
                dropped(ticket.error)

    def _run(self, ticket: OperationTicket, ready: Callable[[], None]) -> None:
        try:
            ready()
        except Exception as error:
            self._drop(ticket, error)

    def _drop(self, ticket: OperationTicket, error: BaseException) -> None:
        self._open.pop(id(ticket), None)
        ticket.error, ticket._ready = error, None
        ticket.agreed.set()
        if ticket._dropped is not None:
            ticket._dropped(error)

    def done(self, ticket: OperationTicket) -> None:
        with self.order:
            self._open.pop(id(ticket), None)

    def agree(self, identity: str, signature: str) -> None:
        """Waits until all workers have come to this operation. Raises DifferError,
        DeadlineError, LostError."""
        ticket = self.begin(identity, signature, each=True)
        with self.waiting(ticket):
            ticket.agreed.wait()
        self.done(ticket)
        if ticket.error is not None:
            raise ticket.error

    @contextmanager
    def waiting(self, ticket: OperationTicket) -> Iterator[None]:
        """The calling thread begins nothing else until that is done."""
        mine = threading.get_ident()
        with self.order:
            self._threads[mine] = ticket
        try:
            yield
        finally:
            with self.order:
                self._threads.pop(mine, None)
                if ticket.error is not None:
                    self.told()

    def fail(self, error: BaseException) -> None:
        """Nothing can be begun any more; what was not agreed is given up."""
        with self.order:
            self._error = self._error or error
            for ticket in list(self._open.values()):
                if not ticket.agreed.is_set():
                    self._drop(ticket, error)
        self._failed(error)

    def _say(self, kind: int, fields: tuple[Any, ...], payload: bytes = b"") -> None:
        assert self._link is not None
        self._link.send(kind, m.encode(fields), [memoryview(payload)])

    # the Receiver of its link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields = m.header(kind, header)
        with self.order:
            match kind:
                case m.FAILED:
                    self.fail(LostError(fields[1]))
                case m.DIFFER if self._waits and self._agreed_open():
                    self._verdict = time.monotonic() + GRACE_S, fields
                case m.DIFFER:
                    self._differ(*fields)
                case m.AGREED if fields[0] == self.epoch:
                    self._agreed(*fields[1:])
                case m.ASKED if fields[0] == self.epoch:
                    (identity, use), blocked = fields[1], self._blocked()
                    place = [] if blocked is None else [blocked.operation.place]
                    self._say(
                        m.HAS, (self.epoch, (identity, use), self._counts[identity] > use, place)
                    )
                case m.AGREED | m.ASKED:
                    pass
                case _:
                    raise WireError(f"a frame of kind {kind} goes the other way")

    def lost(self, error: PeerError) -> None:
        with self.order:
            if self._closed.is_set():
                return
            self._error = self._error or error
            unagreed = any(not ticket.agreed.is_set() for ticket in self._open.values())
        if unagreed:
            self.fail(error)

    def _agreed(self, identity: str, use: int, signature: str) -> None:
        for ticket in list(self._open.values()):
            operation = ticket.operation
            same = (operation.identity, operation.signature) == (identity, signature)
            if not same or ticket.agreed.is_set() or (operation.each and operation.use != use):
                continue
            if not operation.each:
                self._known.add((identity, signature))
            ticket.agreed.set()
            ready, ticket._ready = ticket._ready, None
            if ready is not None:
                self._run(ticket, ready)

    def _agreed_open(self) -> bool:
        return any(ticket.agreed.is_set() for ticket in self._open.values())

    def _meet_verdict(self, now: float) -> None:
        """Carries a verdict out that was put off. Under `order`."""
        if self._verdict is not None and (now >= self._verdict[0] or not self._agreed_open()):
            (_, fields), self._verdict = self._verdict, None
            self._differ(*fields)

    def _differ(self, epoch: int, words: str) -> None:
        if not self._waits:
            self.fail(DifferError(words, hint=HINT))
            return
        given_up, self._open = list(self._open.values()), {}
        self.epoch = epoch
        self._counts.clear()
        self._known.clear()
        self._give_up()
        for ticket in given_up:
            self._drop(ticket, DifferError(words, hint=HINT))
        self._untold, self._given_up = DifferError(words, hint=HINT), bool(given_up)

    # who waits

    def _blocked(self) -> OperationTicket | None:
        """What this worker waits for and begins nothing before. Under `order`."""
        if len(self._threads) != 1 or time.monotonic() - self._begun < STALL_S:
            return None
        (ticket,) = self._threads.values()
        return ticket if id(ticket) in self._open else None

    def _watch(self) -> None:
        said, late = 0.0, list[OperationTicket]()
        while not self._closed.wait(min(LOOK_S, self._deadline_s / 4)):
            with self.order:
                now = time.monotonic()
                self._meet_verdict(now)
                late = [ticket for ticket in self._open.values() if now - ticket.began >= STALL_S]
                over = [
                    ticket
                    for ticket in late
                    if not ticket.agreed.is_set() and now - ticket.began >= self._deadline_s
                ]
                if late and self._waits and now - said >= STALL_S:
                    said = now
                    self._say_stalled(late[:MOST])
            if over:
                self.fail(
                    DeadlineError(
                        f"worker {self.rank} waited {self._deadline_s:.0f} s for all workers to"
                        f" begin {over[0].operation}",
                        hint="is another worker late, or has it ended?",
                    )
                )

    def _say_stalled(self, late: Sequence[OperationTicket]) -> None:
        blocked = self._blocked()
        words, mine = (
            [
                (one.operation.identity, one.operation.use, one.operation.signature)
                for one in tickets
            ]
            for tickets in (late, [] if blocked is None else [blocked])
        )
        with suppress(PeerError):
            self._say(m.STALL, (self.epoch,), msgspec.msgpack.encode((words, mine)))

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._link is not None:
            self._link.close()
