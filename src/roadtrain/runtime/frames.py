"""Messages as frames: which kind, what stands in the typed header (msgpack), which bytes travel as
payload.

    worker -> server   Beat Open Fill Settle Begin Read |
                       Pull Push Close ApplyUpdate DiscardGrad EndStep Commit Committed
    server -> worker   Welcome Progress Filled Settled Ready Record Failed |
                       Pulled GradAccumulated Written Prepared Committed
    worker <-> reducer  Part Moved GivenUp | Sum Failed
    worker <-> worker 0's coordinators  Gone State | Ask Change;  Say Stall Has | Agreed Asked
                                                                  Differ Failed

Those before the bar set a session up (runtime/session_host.py, runtime/session.py), the others are
protocol/messages.py's. Everything is checked on arrival: WireError for what does not fit, nothing
is executed or unpickled (Rule 8).

NOTE language. LANGUAGE is a digest of every message: its name, number and the types of its header,
of hello and of what is not a header but has a form. Both sides of a link show theirs in the
handshake. EDITION counts what types do not say: raise it when a field means something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from roadtrain.chunks import ITEMSIZE, PAGE, Chunk
from roadtrain.errors import WireError
from roadtrain.kernels.cast import NUMPY_OF
from roadtrain.protocol import messages
from roadtrain.units import round_up

(
    OPEN,
    FILL,
    BEGIN,
    READ,
    PULL,
    PUSH,
    CLOSE,
    RELEASE,
    FORGET,
    SEAL,
    COMMIT,
    COMMITTED,
    SETTLE,
    BEAT,
) = range(1, 15)
PROGRESS, WELCOME, FILLED, READY, RECORD, FAILED, PULLED, HELD, PREPARED, SETTLED, WRITTEN = range(
    19, 30
)
PART, MOVED, SUM, GONE, STATE, ASK, CHANGE = range(30, 37)
GIVEN_UP, SAY, STALL, HAS, AGREED, ASKED, DIFFER = range(37, 44)

# session, rank, workers, those of one host (negative: their relay sums), number of the server,
# signature of the layout
Hello = tuple[str, int, int, int, int, str]
HELLO = msgspec.msgpack.Decoder(Hello)
# session, rank, workers, rule: of a summation; "" for a rule: to its coordinator
SumHello = tuple[str, int, int, str]
SUM_HELLO = msgspec.msgpack.Decoder(SumHello)
# begins the greeting of who says that a server may go on without another one
WITHOUT = b"roadtrain without "
# the rest: job, link of its history, servers (protocol/history.py)
Without = tuple[str, str, tuple[int, ...]]
WITHOUT_REST = msgspec.msgpack.Decoder(Without)
_HEADERS: Mapping[int, Any] = {
    # new, generation's step, servers, whether gradients wait for the
    OPEN: tuple[bool, int, int, bool, int, bool],
    # norm, step of its snapshot to go on from, or -1: a new part of the same step is restored from
    # that; given up: what the new part replaces is moved aside
    FILL: tuple[int],
    SETTLE: tuple[()],  # a new part is whole: it counts, with what was committed as payload
    BEGIN: tuple[()],
    READ: tuple[int],  # chunk, or -1: what was committed with the last step
    PULL: tuple[int, int, int],  # chunk, version, ticket
    # chunk, fresh, ticket, values of a sparse one or -1, their dtype;
    PUSH: tuple[int, bool, int, int, str],
    # that of a whole one only where it was downcast
    CLOSE: tuple[int, int],
    RELEASE: tuple[int, int, int, tuple[float, ...]],  # chunk, step, order, hyperparameters
    FORGET: tuple[int],
    SEAL: tuple[int],
    COMMIT: tuple[int],
    COMMITTED: tuple[int],
    BEAT: tuple[()],  # the worker's process runs
    # its newest step, -1 without a store; those of its snapshots,
    WELCOME: tuple[int, tuple[int, ...], int, str],
    # steps between two (0: it takes none); where the state rests
    FILLED: tuple[int],
    # the step that was committed last, the session's servers, the job
    READY: tuple[int, tuple[int, ...], str],
    RECORD: tuple[int],
    FAILED: tuple[str, str],  # class, words
    PULLED: tuple[int, int],
    HELD: tuple[int],
    SETTLED: tuple[()],
    WRITTEN: tuple[int, tuple[tuple[int, int, int], ...]],  # step; owner, sum, weighted sum
    PREPARED: tuple[int],
    PROGRESS: tuple[str, int, int],  # until Ready: what is under way, how much of how much is done
    # tensor, first element, round, elements, format; of the sum itself,
    PART: tuple[int, int, int, int, str, int],
    # bytes of an element, else 0
    MOVED: tuple[()],
    GIVEN_UP: tuple[()],  # what this worker pushed so far and is not summed
    # epoch, identity, use, signature, whether it is agreed each time
    SAY: tuple[int, str, int, str, bool],
    STALL: tuple[int],  # epoch; the payload: operations, what is blocked on
    # epoch, what was asked for, whether it has begun,
    HAS: tuple[int, tuple[str, int], bool, list[tuple[str, int]]],
    # what it is blocked on (none or one)
    AGREED: tuple[int, str, int, str],  # epoch, identity, use, signature
    ASKED: tuple[int, tuple[str, int]],  # epoch, identity and use
    DIFFER: tuple[int, str],  # the epoch that begins, why
    # tensor, first element, round, whether a worker had it: as it is in memory
    SUM: tuple[int, int, int, bool],
    GONE: tuple[int, str],  # reducer, why
    STATE: tuple[int, tuple[int, ...]],  # number of the question, refused reducers
    ASK: tuple[int, tuple[tuple[int, str, float], ...]],  # number, new reducers
    # number, reducers that are gone, new ones
    CHANGE: tuple[int, tuple[int, ...], tuple[tuple[int, str, float], ...]],
}
# payload of a state: last round begun, whether it is complete; of a change: last round that any has
# begun, first that any lacks
Rounds = dict[int, tuple[int, int]]
ROUNDS = msgspec.msgpack.Decoder(Rounds)
# what watch.answer says: of the server; worker -> (seconds, what it waits for); seconds of each
# stage
Status = tuple[str, Mapping[str, tuple[float, str]], Mapping[str, float]]
# payload of a stall: all that a worker waits for, and what its thread does (none or one): identity,
# use, signature
Stalled = tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]
STALLED = msgspec.msgpack.Decoder(Stalled)
_DECODERS = {kind: msgspec.msgpack.Decoder(header) for kind, header in _HEADERS.items()}
encode = msgspec.msgpack.Encoder().encode


def _shape(kind: Any) -> str:
    """A type as text that is the same in every version of Python."""
    inside = ", ".join("..." if arg is ... else _shape(arg) for arg in get_args(kind))
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return f"{name}[{inside}]" if inside else name


def language_of(words: Mapping[str, Any]) -> bytes:
    """16 bytes: of names and the types that they stand for."""
    told = [
        f"{name}: {kind if isinstance(kind, (int, str)) else _shape(kind)}"
        for name, kind in sorted(words.items())
    ]
    return hashlib.blake2b("\n".join(told).encode(), digest_size=16).digest()


_KINDS = {
    name: number for name, number in vars().items() if type(number) is int and number in _HEADERS
}
EDITION = 2  # NOTE language
LANGUAGE = language_of(
    {
        **{f"{name} = {number}": _HEADERS[number] for name, number in _KINDS.items()},
        "edition": EDITION,
        "hello": Hello,
        "hello of a summation": SumHello,
        "without": Without,
        "rounds": Rounds,
        "status": Status,
        "stalled": Stalled,
    }
)
T = TypeVar("T")


def header(kind: int, raw: bytes) -> Any:
    """The header's fields. WireError for an unknown kind or a header of another shape."""
    if kind not in _DECODERS:
        raise WireError(f"a frame of unknown kind {kind}")
    return decoded(_DECODERS[kind], raw, f"the header of a frame of kind {kind}")


def decoded(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    """WireError for another shape."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(f"{what}: {error}") from error


def rounds(payload: memoryview) -> dict[int, tuple[int, int]]:
    """Of a state or a change."""
    return decoded(ROUNDS, payload, "the rounds of a change of spare hosts")


def stalled(payload: memoryview) -> Stalled:
    return decoded(STALLED, payload, "what a worker waits for")


def as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def frame(message: Any) -> tuple[int, bytes, Sequence[memoryview]]:
    """(kind, header, payload) of what a worker says to a server; of a pull without where it
    goes."""
    match message:
        case messages.Pull(chunk, version, _, ticket):
            return PULL, encode((chunk, version, ticket)), ()
        case messages.Push(chunk, (indices, values), fresh, _, ticket, sums):
            dtype = "fp32" if values.dtype == np.float32 else "16"
            parts = [as_bytes(np.asarray(sums)), as_bytes(indices), as_bytes(values)]
            return PUSH, encode((chunk, fresh, ticket, len(values), dtype)), parts
        case messages.Push(chunk, _, fresh, _, ticket):
            return PUSH, encode((chunk, fresh, ticket, -1, message.dtype)), [message.sent]
        case messages.Close(chunk, step):
            return CLOSE, encode((chunk, step)), ()
        case messages.ApplyUpdate(chunk, step, hyper, scales, order):
            there = np.array([s is not None for s in scales])
            parts = [as_bytes(np.array([0.0 if s is None else s for s in scales])), as_bytes(there)]
            return RELEASE, encode((chunk, step, order, hyper)), parts
        case messages.DiscardGrad(chunk):
            return FORGET, encode((chunk,)), ()
        case messages.EndStep(step):
            return SEAL, encode((step,)), ()
        case messages.Commit(step, blob):
            return COMMIT, encode((step,)), [memoryview(blob)]
        case messages.CommitDone(step):
            return COMMITTED, encode((step,)), ()
    raise AssertionError(message)


def apply_update(
    fields: Any, payload: memoryview, chunk: Chunk, worker: int
) -> messages.ApplyUpdate:
    number, step, order, hyper = fields
    n = len(chunk.spans)
    if len(payload) != 9 * n:
        raise WireError(
            f"a release of chunk {number} with {len(payload)} bytes of scales, {9 * n} expected"
        )
    there = np.frombuffer(payload, np.uint8, n, 8 * n)
    scales = [float(s) if t else None for s, t in zip(np.frombuffer(payload, np.float64, n), there)]
    return messages.ApplyUpdate(number, step, hyper, scales, order, worker)


def push_nbytes(fields: Any, chunk: Chunk, dense: int) -> int:
    """The payload of a push of `chunk`; `dense`: that of a whole gradient, not downcast."""
    _, _, _, k, dtype = fields
    if k < 0 and not dtype:
        return dense
    if k < 0:
        if dtype not in ("bf16", "fp16") or chunk.dtype != "fp32":
            raise WireError(
                f"a gradient of chunk {chunk.id}, which is {chunk.dtype}, came as {dtype!r}"
            )
        return round_up(chunk.numel * ITEMSIZE[dtype], PAGE)
    return 8 * len(chunk.segments) + k * (4 + (4 if dtype == "fp32" else 2))


def push(fields: Any, payload: memoryview, chunk: Chunk, keep: bool, worker: int) -> messages.Push:
    number, fresh, ticket, k, dtype = fields
    if k < 0:
        return messages.Push(number, payload, fresh, keep, ticket, None, worker, dtype)
    n = len(chunk.segments)
    indices = np.frombuffer(payload, np.uint32, k, 8 * n)
    kind = np.float32 if dtype == "fp32" else NUMPY_OF[chunk.dtype]
    values = np.frombuffer(payload, kind, k, 8 * n + 4 * k)
    if k and int(indices.max()) >= chunk.numel:
        raise WireError(
            f"an index {int(indices.max())} in a gradient of chunk {number}, which has"
            f" {chunk.numel}"
        )
    return messages.Push(
        number,
        (indices, values),
        fresh,
        False,
        ticket,
        np.frombuffer(payload, np.float64, n),
        worker,
    )
