"""Agreement: every worker's side of what sums/protocol/agreement.py decides beside worker 0.

    ticket = agreement.begin("gradient of x", "fp32 [4, 4]")
    agreement.run(ticket, ready, dropped)     ready: at once, where all have agreed about that
                                              before
    agreement.done(ticket)

What is known costs no message. A thread looks at what waits: after a second it says so, after the
deadline it ends all (Rule 5). Assumes that `dropped` returns soon. Does NOT sum.
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

from roadtrain.errors import DeadlineError, DifferError, PeerError
from roadtrain.sums import sum_frames
from roadtrain.sums.protocol.agreement import Operation

STALL_S, LOOK_S = 1.0, 0.25  # of waiting, before it is said; between two looks
GRACE_S = 1.0  # for what all have begun to end, once a verdict has come
MOST = 256  # operations in one word of who waits
TEXT = 1000  # letters of an identity or a signature that are told
HINT = "every worker runs the same program over the same model"


def short(text: str) -> str:
    """Other texts stay other ones."""
    if len(text) <= TEXT:
        return text
    return f"{text[:TEXT]}... {blake2b(text.encode(), digest_size=8).hexdigest()}"


class OperationTicket:
    """Of one operation under way here. `error`: why it is given up."""

    def __init__(self, operation: Operation, epoch: int) -> None:
        self.operation, self.epoch, self.began = operation, epoch, time.monotonic()
        self.agreed = threading.Event()  # or given up
        self.error: BaseException | None = None
        self._ready: Callable[[], None] | None = None
        self._dropped: Callable[[BaseException], None] | None = None


class Agreement:
    """The agreement of one worker with the others. `waits`: as the state machine has it. `say`: to
    the coordinator; None where there is one worker. `give_up`: all sums that are under way, before
    their `dropped` are called; `failed`: is called with the error that ends all. A program sees
    each disagreement once: in a wait for what was given up, else in what it begins next.

    Invariants, under `order`: an open ticket is of this epoch; one with `_ready` is not agreed."""

    def __init__(
        self,
        rank: int,
        waits: bool,
        deadline_s: float,
        say: Callable[..., None] | None,
        give_up: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.rank, self._waits, self._deadline_s = rank, waits, deadline_s
        self._alone, self._say = say is None, say or (lambda *_: None)
        self._give_up, self._failed = give_up, failed
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
        self._closed, self._watcher = threading.Event(), threading.Thread()
        if not self._alone:
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
                ticket = OperationTicket(Operation(identity, -1, signature, each), self.epoch)
                self._drop(ticket, error)
                return ticket
            operation = Operation(identity, self._counts[identity], short(signature), each)
            self._counts[identity] += 1
            ticket = OperationTicket(operation, self.epoch)
            self._begun = ticket.began
            known = self._alone or (not each and (identity, operation.signature) in self._known)
            if not known:
                self._say(
                    sum_frames.SAY, (self.epoch, identity, operation.use, operation.signature, each)
                )
            self._open[id(ticket)] = ticket
            if known or not (self._waits or each):
                self._known.add((identity, operation.signature))
                ticket.agreed.set()
        return ticket

    def told(self) -> None:
        """The program here knows of the last disagreement: what it begins is of the new epoch."""
        with self.order:
            self._untold, self._given_up = None, False

    def program_goes_on(self) -> None:
        """It has begun anew, so it knows; unless nothing of it has been given up yet. Waits for a
        verdict that is being carried out: the program heard of it in the middle of that."""
        with self.order:
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

    # what the coordinator says

    def heard(self, kind: int, fields: Any) -> None:
        with self.order:
            match kind:
                case sum_frames.DIFFER if self._waits and self._agreed_open():
                    self._verdict = time.monotonic() + GRACE_S, fields
                case sum_frames.DIFFER:
                    self._differ(*fields)
                case sum_frames.AGREED if fields[0] == self.epoch:
                    self._agreed(*fields[1:])
                case sum_frames.ASKED if fields[0] == self.epoch:
                    (identity, use), blocked = fields[1], self._blocked()
                    place = [] if blocked is None else [blocked.operation.place]
                    self._say(
                        sum_frames.HAS,
                        (self.epoch, (identity, use), self._counts[identity] > use, place),
                    )
                case _:
                    pass  # of an epoch that is over

    def lost(self, error: PeerError) -> None:
        """What was agreed goes on."""
        with self.order:
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
            self._say(sum_frames.STALL, (self.epoch,), msgspec.msgpack.encode((words, mine)))

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
