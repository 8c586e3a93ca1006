"""Agreement: checks, at one worker, that all workers begin the same operations. The coordinator at
worker 0 decides. Does NOT sum tensors.

    ticket = agreement.begin("gradient of x", "fp32 [4, 4]")
    agreement.run(ticket, ready, dropped)     calls ready() once all workers have begun the same
                                              operation, or at once if they agreed on it earlier
    agreement.done(ticket)

If the workers have not agreed on an operation by the deadline, the summation ends (Rule 5: every
wait has a deadline).
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

STALL_S, CHECK_S = 1.0, 0.25  # a wait is reported after STALL_S; waits are checked every CHECK_S
GRACE_S = 1.0  # timeout for agreed operations to finish after a mismatch
MOST = 256  # operations in one Stall frame
TEXT = 1000  # longest identity or signature that is sent
HINT = "every worker must run the same program over the same model"


def short(text: str) -> str:
    """Shorten a text of more than 1000 characters to its first 1000 characters and a hash of the
    whole."""
    if len(text) <= TEXT:
        return text
    return f"{text[:TEXT]}... {blake2b(text.encode(), digest_size=8).hexdigest()}"


class OperationTicket:
    """An operation that this worker has begun. `error` is the reason why the operation was
    abandoned, or None."""

    def __init__(self, operation: Operation, epoch: int) -> None:
        self.operation, self.epoch, self.began = operation, epoch, time.monotonic()
        self.agreed = threading.Event()  # set when agreed or abandoned
        self.error: BaseException | None = None
        self._ready: Callable[[], None] | None = None
        self._dropped: Callable[[BaseException], None] | None = None


class Agreement:
    """The agreement of one worker with all other workers.

    A mismatch means that workers have begun different operations. The program gets the error of
    each mismatch once: from waiting for an abandoned operation, or else from beginning the next
    operation.

    Args:
        waits: Whether the workers wait for each other in every operation (False in asynchronous
            training).
        say: Sends a frame to the coordinator. None if there is only one worker.
        give_up: Abandons all sums in progress. Called before the `dropped` callbacks of these sums.
        failed: Called with the error that ends the summation.

    Invariants, while the lock `order` is held: every open ticket belongs to the current epoch; a
    ticket has a `_ready` callback only until the workers agree on its operation.
    """

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
        self.order = threading.RLock()  # orders operations that begin and new epochs
        self.epoch = 0
        self._open: dict[int, OperationTicket] = {}
        self._counts: Counter[str] = Counter()  # operations begun in this epoch, by identity
        self._settled: set[tuple[str, str]] = set()  # (identity, signature) that are agreed on
        self._threads: dict[int, OperationTicket] = {}  # waiting thread -> ticket it waits for
        self._begun = 0.0  # time when the last operation was begun
        # A mismatch that the program has not seen yet. Operations begun meanwhile are abandoned.
        self._unseen: DifferError | None = None
        self._given_up = False  # whether an abandoned operation shows the mismatch as its error
        # A mismatch that is held back until a deadline. Operations that are agreed on may have
        # finished at other workers already, and so get time to finish here.
        self._verdict: tuple[float, tuple[int, str]] | None = None
        self._error: BaseException | None = None
        self._closed, self._watcher = threading.Event(), threading.Thread()
        if not self._alone:
            self._watcher = threading.Thread(target=self._watch, name="agreement", daemon=True)
            self._watcher.start()

    def begin(self, identity: str, signature: str, each: bool = False) -> OperationTicket:
        """Begin an operation.

        Args:
            identity: Name of the operation.
            signature: Details that must be the same at all workers, such as the dtype and shape.
            each: Whether the workers must agree again on an identity and signature that they agreed
                on earlier.

        Raises:
            DifferError: Workers began different operations earlier, and no operation of this worker
                was abandoned. Raised once for each mismatch.
            BaseException: The error that has ended the summation.
        """
        with self.order:
            if self._error is not None:
                raise self._error
            identity = short(identity)
            if self._unseen is not None:
                error = self._unseen
                if not self._given_up:
                    self.mark_seen()
                    raise error
                ticket = OperationTicket(Operation(identity, -1, signature, each), self.epoch)
                self._drop(ticket, error)
                return ticket
            operation = Operation(identity, self._counts[identity], short(signature), each)
            self._counts[identity] += 1
            ticket = OperationTicket(operation, self.epoch)
            self._begun = ticket.began
            agreed = self._alone or (not each and (identity, operation.signature) in self._settled)
            if not agreed:
                self._say(
                    sum_frames.SAY, (self.epoch, identity, operation.use, operation.signature, each)
                )
            self._open[id(ticket)] = ticket
            if agreed or not (self._waits or each):
                self._settled.add((identity, operation.signature))
                ticket.agreed.set()
        return ticket

    def mark_seen(self) -> None:
        """Note that the program has seen the error of the last mismatch, and may begin operations
        again."""
        with self.order:
            self._unseen, self._given_up = None, False

    def resume(self) -> None:
        """Note that the program continues after the error of an abandoned operation, and may begin
        operations again. Blocks while a mismatch is being handled."""
        with self.order:
            if self._given_up:
                self.mark_seen()

    def run(
        self,
        ticket: OperationTicket,
        ready: Callable[[], None],
        dropped: Callable[[BaseException], None],
    ) -> None:
        """Call `ready` once all workers agree on the operation, while the lock `order` is held. If
        the operation is abandoned, call `dropped` with the error; until `done` is called, this may
        follow `ready`. `dropped` must return soon."""
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
        """Begin an operation, and wait until all workers have begun the same operation. Raises
        DifferError, DeadlineError, LostError."""
        ticket = self.begin(identity, signature, each=True)
        with self.waiting(ticket):
            ticket.agreed.wait()
        self.done(ticket)
        if ticket.error is not None:
            raise ticket.error

    @contextmanager
    def waiting(self, ticket: OperationTicket) -> Iterator[None]:
        """Declare that the calling thread is blocked on the operation of `ticket` and begins no
        other operation, while the context is active."""
        mine = threading.get_ident()
        with self.order:
            self._threads[mine] = ticket
        try:
            yield
        finally:
            with self.order:
                self._threads.pop(mine, None)
                if ticket.error is not None:
                    self.mark_seen()

    def fail(self, error: BaseException) -> None:
        """End the summation with `error`. Operations on which the workers have not agreed are
        abandoned."""
        with self.order:
            self._error = self._error or error
            for ticket in list(self._open.values()):
                if not ticket.agreed.is_set():
                    self._drop(ticket, error)
        self._failed(error)

    # frames of the coordinator

    def take(self, kind: int, fields: Any) -> None:
        with self.order:
            match kind:
                case sum_frames.MISMATCH if self._waits and self._agreed_open():
                    self._verdict = time.monotonic() + GRACE_S, fields
                case sum_frames.MISMATCH:
                    self._mismatch(*fields)
                case sum_frames.AGREED if fields[0] == self.epoch:
                    self._agreed(*fields[1:])
                case sum_frames.ASK_BEGUN if fields[0] == self.epoch:
                    (identity, use), blocked = fields[1], self._blocked()
                    place = [] if blocked is None else [blocked.operation.place]
                    self._say(
                        sum_frames.HAS,
                        (self.epoch, (identity, use), self._counts[identity] > use, place),
                    )
                case _:
                    pass  # the frame belongs to an earlier epoch

    def lost(self, error: PeerError) -> None:
        """Handle the loss of the coordinator. Operations on which the workers have agreed can still
        finish."""
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
                self._settled.add((identity, signature))
            ticket.agreed.set()
            ready, ticket._ready = ticket._ready, None
            if ready is not None:
                self._run(ticket, ready)

    def _agreed_open(self) -> bool:
        return any(ticket.agreed.is_set() for ticket in self._open.values())

    def _apply_verdict(self, now: float) -> None:
        """Handle the pending mismatch, if any, when all agreed operations are done or have had a
        second to finish."""
        if self._verdict is not None and (now >= self._verdict[0] or not self._agreed_open()):
            (_, fields), self._verdict = self._verdict, None
            self._mismatch(*fields)

    def _mismatch(self, epoch: int, words: str) -> None:
        if not self._waits:
            self.fail(DifferError(words, hint=HINT))
            return
        given_up, self._open = list(self._open.values()), {}
        self.epoch = epoch
        self._counts.clear()
        self._settled.clear()
        self._give_up()
        for ticket in given_up:
            self._drop(ticket, DifferError(words, hint=HINT))
        self._unseen, self._given_up = DifferError(words, hint=HINT), bool(given_up)

    # waits

    def _blocked(self) -> OperationTicket | None:
        """Return the operation on which this worker is blocked, or None. The caller holds the lock
        `order`."""
        if len(self._threads) != 1 or time.monotonic() - self._begun < STALL_S:
            return None
        (ticket,) = self._threads.values()
        return ticket if id(ticket) in self._open else None

    def _watch(self) -> None:
        reported, late = 0.0, list[OperationTicket]()
        while not self._closed.wait(min(CHECK_S, self._deadline_s / 4)):
            with self.order:
                now = time.monotonic()
                self._apply_verdict(now)
                late = [ticket for ticket in self._open.values() if now - ticket.began >= STALL_S]
                over = [
                    ticket
                    for ticket in late
                    if not ticket.agreed.is_set() and now - ticket.began >= self._deadline_s
                ]
                if late and self._waits and now - reported >= STALL_S:
                    reported = now
                    self._report_stall(late[:MOST])
            if over:
                self.fail(
                    DeadlineError(
                        f"worker {self.rank} waited {self._deadline_s:.0f} s for all workers to"
                        f" begin {over[0].operation}",
                        hint="is another worker late, or has it ended?",
                    )
                )

    def _report_stall(self, late: Sequence[OperationTicket]) -> None:
        blocked = self._blocked()
        waits, mine = (
            [(o.identity, o.use, o.signature) for o in (ticket.operation for ticket in tickets)]
            for tickets in (late, [] if blocked is None else [blocked])
        )
        with suppress(PeerError):
            self._say(sum_frames.STALL, (self.epoch,), msgspec.msgpack.encode((waits, mine)))

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
