"""The words that state machines speak: messages between worker and server, what a server's doers
report, what it tells them.

Messages travel over a link; events come from the server's own doers; actions go to them. All are
frozen values, so a schedule can be written down, compared and simulated. `into`, `grad` and `blob`
are opaque here (a memoryview in the real run, None in a simulated one). `worker` is who sent a
message: the server's end of the link sets it.

With one worker a server reports the sum of squares of each push (GradAccumulated), and acts on each
ApplyUpdate. With several it waits until every worker has closed a chunk's gradient (by Close, or by
ApplyUpdate), sums in worker order and tells all; an update begins when every worker has released
it. Then a trainable chunk gets one version a step, gradient or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pull:
    """Worker -> server: copy chunk's weights part into `into` as soon as at least `version`
    updates were applied."""

    chunk: int
    version: int
    into: Any
    ticket: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """Worker -> server: a gradient (dense: `grad` in the chunk's dtype; sparse: `grad` =
    (indices, values), sums of squares taken before compression; put away: `grad` = its lane, see
    Spill). `fresh`: first of its step, so it replaces what is held. `keep`: the server may keep
    `grad` where it lies until the update; else it moves it to its own place. BufferFree(ticket)
    says when. `dtype`: of a dense gradient that was downcast from the chunk's; its values are
    the first half of `grad` then."""

    chunk: int
    grad: Any
    fresh: bool
    keep: bool
    ticket: int
    sums: Any = None
    worker: int = 0
    dtype: str = ""

    @property
    def sent(self) -> Any:
        """What travels of a dense gradient."""
        return self.grad[: len(self.grad) // 2] if self.dtype else self.grad


@dataclass(frozen=True, slots=True)
class Close:
    """Worker -> server, only where there are several: my gradient of `chunk` for `step` is
    whole (or there is none)."""

    chunk: int
    step: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Worker -> server: apply the rule to the held gradient as part of `step`. `scales`: one a
    span of the chunk, None where the parameter has no gradient in this step. `order`: smaller is
    wanted sooner."""

    chunk: int
    step: int
    hyper: tuple[float, ...]
    scales: Sequence[float | None]
    order: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class DiscardGrad:
    """Worker -> server: drop my held gradient of `chunk`."""

    chunk: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class EndStep:
    """Worker -> server: no more releases for `step`."""

    step: int
    worker: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Worker -> first server: all others are prepared; `blob` is the job's own state after `step`,
    this worker's part. With replicas to the others too, before they prepare and once all are known
    to have written the same.
    """

    step: int
    blob: Any
    worker: int = 0


@dataclass(frozen=True, slots=True)
class CommitDone:
    """First server -> worker -> all servers: `step` is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class Pulled:
    ticket: int
    chunk: int


@dataclass(frozen=True, slots=True)
class GradAccumulated:
    """Server -> worker: the accumulated gradient's sum of squares, one a segment of the chunk."""

    chunk: int
    sums: Any


@dataclass(frozen=True, slots=True)
class BufferFree:
    """Server -> worker: the server no longer reads the memory of the push `ticket`."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Server -> worker: all of `step` is written here (and durable, except on the first, which
    still has to commit)."""

    server: int
    step: int


@dataclass(frozen=True, slots=True)
class Written:
    """Server -> worker, only with replicas and before it prepares: all of `step` is written
    here. `sums`: for every owner of chunks held here, (owner, sum, weighted sum) of the
    checksums of what the step made of them (protocol/commit.py compares them)."""

    server: int
    step: int
    sums: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """Server -> worker: the server ended with `error`."""

    server: int
    error: BaseException


# events, besides messages


@dataclass(frozen=True, slots=True)
class Done:
    """A doer has carried `action` out. `result`: of Hold (sums of squares of the worker's
    gradient, whether the pushed memory is in use until the update), of Total (sums of squares of
    the sum over workers), a segment each; of Update (with replicas the checksum of what it
    made)."""

    action: Any
    result: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link of `worker` has ended."""

    worker: int
    why: str


# actions: what the state machine tells the doers


@dataclass(frozen=True, slots=True)
class Hold:
    push: Push


@dataclass(frozen=True, slots=True)
class Spill:
    """Write what was pushed to `lane` of the spill file (those of the workers come first),
    until its step's turn."""

    push: Push
    spill_slot: int

    @property
    def worker(self) -> int:
        return self.push.worker


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the gradient of `chunk`: that of one worker, or (None) of all."""

    chunk: int
    worker: int | None


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of squares of what the workers pushed, added in their order."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Copy the weights part to `pull.into`: from the record buffer or cache (`memory`), else from
    the file. `newest`: cast from the master instead, which is one update ahead of it (staleness
    1)."""

    pull: Pull
    memory: bool
    newest: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Read the record of `chunk` into record buffer `buffer`."""

    chunk: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Update:
    chunk: int
    apply_update: ApplyUpdate


@dataclass(frozen=True, slots=True)
class Write:
    chunk: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make everything written so far durable as `step`; `blobs`, one a worker, are given where
    this is the commit."""

    step: int
    blobs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Send:
    """To one worker, or (None) to all."""

    message: Any
    to: int | None = None
