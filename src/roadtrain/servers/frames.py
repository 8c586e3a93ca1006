"""Messages as frames: the kind of each frame, its typed header (msgpack), and its payload.

    worker -> server   Beat Open Fill Settle Begin Read |
                       Pull Push Close ApplyUpdate DiscardGrad EndStep Commit Committed
    server -> worker   Welcome Progress Filled Settled Ready Record Failed |
                       Pulled GradAccumulated Written Prepared Committed

The frames before the bar set a session up (servers/serve.py, servers/remote_servers.py); the others
carry the messages of servers/protocol/messages.py. Everything is checked on arrival: a frame that
does not fit raises WireError, and nothing is executed or unpickled (Rule 8).

Optional packages have frames of their own (sums/sum_frames.py, switch/switch_frames.py), with
numbers that are used nowhere else.

NOTE language. LANGUAGE is a digest of all messages of all packages: the name and number of each,
and the types of its header; also of the hello and of payloads that have types. Both ends of a link
exchange it in the handshake. tests/unit/test_language.py computes it and prints the new value.
EDITION stands for what types cannot express: raise it when the meaning of a field changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from roadtrain.chunks import ITEMSIZE, PAGE, Chunk
from roadtrain.errors import WireError
from roadtrain.kernels.cast import NUMPY_OF
from roadtrain.servers.protocol import messages
from roadtrain.storage.ledger import pack
from roadtrain.units import round_up

# Kinds of frames. Numbers are never reused.

# worker -> server
OPEN = 1
FILL = 2
BEGIN = 3
READ = 4
PULL = 5
PUSH = 6
CLOSE = 7
APPLY_UPDATE = 8
DISCARD_GRAD = 9
END_STEP = 10
COMMIT = 11
COMMITTED = 12  # also server -> worker
SETTLE = 13
BEAT = 14

# server -> worker
PROGRESS = 19
WELCOME = 20
FILLED = 21
READY = 22
RECORD = 23
FAILED = 24  # between any two roles, in both directions
PULLED = 25
GRAD_ACCUMULATED = 26
PREPARED = 27
SETTLED = 28
WRITTEN = 29
STEP_WORDS = 49


class ChunkHeader(NamedTuple):
    chunk: int  # in Read and Record also -1: the blobs committed with the last step


class StepHeader(NamedTuple):
    step: int


class OpenHeader(NamedTuple):
    """Worker 0's order to open or make the server's part of the store. The payload describes it."""

    new: bool  # make the part; otherwise open it
    step: int  # of the generation to open or make
    servers: int  # servers that the store is spread over
    holds_gradients: bool  # gradients wait for the global norm
    snapshot: int  # resume from the snapshot of this step, if the new part is of it; -1: none
    given_up: bool  # move aside the contents that the new part replaces


class WelcomeHeader(NamedTuple):
    step: int  # newest step of the store here, -1 without a store
    snapshots: tuple[int, ...]  # steps of its snapshots
    every: int  # steps between two snapshots; 0: none are taken
    rests: str  # location of the state, as text


WAITS_ONLY = -1


class ProgressHeader(NamedTuple):
    """The reason why a server keeps its workers waiting, with its progress until Ready."""

    doing: str
    done: int
    of: int  # WAITS_ONLY: no progress; `doing` names who does not answer ("": everybody does)


class ReadyHeader(NamedTuple):
    step: int  # the last committed step
    members: tuple[int, ...]  # the session's servers
    job: str


class PullHeader(NamedTuple):
    chunk: int
    version: int
    ticket: int


class PulledHeader(NamedTuple):
    ticket: int
    chunk: int


class PushHeader(NamedTuple):
    chunk: int
    fresh: bool  # the first of its step: it replaces what is held
    ticket: int
    values: int  # number of values of a sparse gradient; -1: it is dense
    dtype: str  # of the values; of a dense gradient only if it was downcast, else ""

    @property
    def dense(self) -> bool:
        return self.values < 0


class CloseHeader(NamedTuple):
    chunk: int
    step: int


class ApplyUpdateHeader(NamedTuple):
    chunk: int
    step: int
    order: int
    hyperparameters: tuple[float, ...]


class WrittenHeader(NamedTuple):
    step: int
    sums: tuple[tuple[int, int, int], ...]  # (owner, sum, weighted sum) for each owner


class FailedHeader(NamedTuple):
    error: str  # name of the exception class
    words: str


NO_FIELDS = tuple[()]
HEADERS: Mapping[int, Any] = {
    OPEN: OpenHeader,
    FILL: ChunkHeader,  # the payload is its record
    SETTLE: NO_FIELDS,  # a new part is complete and counts; the payload is the blobs of its step
    BEGIN: NO_FIELDS,
    READ: ChunkHeader,
    PULL: PullHeader,
    PUSH: PushHeader,
    CLOSE: CloseHeader,
    APPLY_UPDATE: ApplyUpdateHeader,
    DISCARD_GRAD: ChunkHeader,
    END_STEP: StepHeader,
    COMMIT: StepHeader,
    COMMITTED: StepHeader,
    BEAT: NO_FIELDS,  # heartbeat of a worker's process
    WELCOME: WelcomeHeader,
    FILLED: ChunkHeader,
    READY: ReadyHeader,
    RECORD: ChunkHeader,
    FAILED: FailedHeader,
    PULLED: PulledHeader,
    GRAD_ACCUMULATED: ChunkHeader,
    SETTLED: NO_FIELDS,
    WRITTEN: WrittenHeader,
    PREPARED: StepHeader,
    STEP_WORDS: StepHeader,
    PROGRESS: ProgressHeader,
}


# Typed bytes that are not headers


class Hello(NamedTuple):
    """A worker's greeting to a server."""

    session: str
    rank: int
    workers: int
    local: int  # workers per host that are summed first; negative: a relay has summed them
    server: int  # number of the server
    signature: str  # digest of the layout


# Prefix of a hello that tells a server to resume without others; a Without follows it.
WITHOUT = b"roadtrain without "


class Without(NamedTuple):
    job: str
    link: str  # id of the last link of the history (storage/history.py)
    servers: tuple[int, ...]


# The answer of health.answer: the server's state, worker -> (seconds, what it waits for), and
# stage -> seconds.
Status = tuple[str, Mapping[str, tuple[float, str]], Mapping[str, float]]
HELLO = msgspec.msgpack.Decoder(Hello)
WITHOUT_REST = msgspec.msgpack.Decoder(Without)
_DECODERS: dict[int, Any] = {}
encode = msgspec.msgpack.Encoder().encode


def declare(headers: Mapping[int, Any]) -> None:
    """Register the headers of these kinds of frames. Each package with frames calls it once."""
    _DECODERS.update({kind: msgspec.msgpack.Decoder(header) for kind, header in headers.items()})


def _shape(kind: Any) -> str:
    """Return a type as text, equal in all versions of Python. Named fields are left out."""
    if hasattr(kind, "_fields"):
        return f"tuple[{', '.join(map(_shape, get_type_hints(kind).values()))}]"
    inside = ", ".join("..." if arg is ... else _shape(arg) for arg in get_args(kind))
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return f"{name}[{inside}]" if inside else name


def language_of(words: Mapping[str, Any]) -> bytes:
    """Return a digest of 16 bytes over names and their types or numbers."""
    lines = [
        f"{name}: {kind if isinstance(kind, (int, str)) else _shape(kind)}"
        for name, kind in sorted(words.items())
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


EDITION = 2  # NOTE language
LANGUAGE = bytes.fromhex("fdae9b385dee9fc4021df983f2ccb1a3")  # NOTE language
T = TypeVar("T")


declare(HEADERS)


def header(kind: int, raw: bytes) -> Any:
    """Decode a header. Raises WireError if the kind is unknown or the header does not fit it."""
    if kind not in _DECODERS:
        raise WireError(f"a frame of unknown kind {kind}")
    return decoded(_DECODERS[kind], raw, f"the header of a frame of kind {kind}")


def decoded(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    """Decode bytes. Raises WireError if they have another type."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(f"{what}: {error}") from error


def as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def frame(message: Any) -> tuple[int, bytes, Sequence[memoryview]]:
    """Return (kind, header, payload) of a message from a worker. For a pull, `into` is left
    out."""
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
            return APPLY_UPDATE, encode((chunk, step, order, hyper)), parts
        case messages.DiscardGrad(chunk):
            return DISCARD_GRAD, encode((chunk,)), ()
        case messages.EndStep(step, _, word):
            return END_STEP, encode((step,)), [memoryview(word)] if word else ()
        case messages.Commit(step, blob):
            return COMMIT, encode((step,)), [memoryview(blob)]
        case messages.CommitDone(step):
            return COMMITTED, encode((step,)), ()
    raise AssertionError(message)


def reply(message: Any) -> tuple[int, tuple[Any, ...], bytes | memoryview]:
    """Return (kind, fields, payload) of a message from a server."""
    match message:
        case messages.GradAccumulated(chunk, sums):
            return GRAD_ACCUMULATED, (chunk,), as_bytes(sums)
        case messages.Written(_, step, chunk_sums):
            return WRITTEN, (step, chunk_sums), b""
        case messages.Prepared(_, step):
            return PREPARED, (step,), b""
        case messages.CommitDone(step):
            return COMMITTED, (step,), b""
        case messages.StepWords(step, words):
            return STEP_WORDS, (step,), pack(words)
    raise AssertionError(message)


def apply_update(
    fields: ApplyUpdateHeader, payload: memoryview, chunk: Chunk, worker: int
) -> messages.ApplyUpdate:
    n = len(chunk.spans)
    if len(payload) != 9 * n:
        raise WireError(
            f"an update of chunk {chunk.id} came with {len(payload)} bytes of scales instead of"
            f" {9 * n}"
        )
    there = np.frombuffer(payload, np.uint8, n, 8 * n)
    scales = [float(s) if t else None for s, t in zip(np.frombuffer(payload, np.float64, n), there)]
    return messages.ApplyUpdate(
        fields.chunk, fields.step, fields.hyperparameters, scales, fields.order, worker
    )


def push_nbytes(fields: PushHeader, chunk: Chunk, dense: int) -> int:
    """Return the payload bytes of a push of `chunk`. `dense`: those of a dense gradient that is not
    downcast."""
    dtype = fields.dtype
    if not fields.dense:
        itemsize = 4 if dtype == "fp32" else 2
        return 8 * len(chunk.segments) + fields.values * (4 + itemsize)
    if not dtype:
        return dense
    if dtype not in ("bf16", "fp16") or chunk.dtype != "fp32":
        raise WireError(f"a gradient of chunk {chunk.id} of dtype {chunk.dtype} came as {dtype!r}")
    return round_up(chunk.numel * ITEMSIZE[dtype], PAGE)


def push(
    fields: PushHeader, payload: memoryview, chunk: Chunk, keep: bool, worker: int
) -> messages.Push:
    number, fresh, ticket, k, dtype = fields
    if fields.dense:
        return messages.Push(number, payload, fresh, keep, ticket, None, worker, dtype)
    n = len(chunk.segments)
    sums = np.frombuffer(payload, np.float64, n)
    indices = np.frombuffer(payload, np.uint32, k, 8 * n)
    kind = np.float32 if dtype == "fp32" else NUMPY_OF[chunk.dtype]
    values = np.frombuffer(payload, kind, k, 8 * n + 4 * k)
    if k and int(indices.max()) >= chunk.numel:
        raise WireError(
            f"a gradient of chunk {number} has an index {int(indices.max())}, the chunk has"
            f" {chunk.numel} elements"
        )
    return messages.Push(number, (indices, values), fresh, False, ticket, sums, worker)
