"""Messages as frames: the kind of each frame, its typed header (msgpack), and its payload.

    worker -> server   Beat Open Fill Settle Begin Read |
                       Pull Push Close ApplyUpdate DiscardGrad EndStep Commit Committed
    server -> worker   Welcome Progress Filled Settled Ready Record Failed |
                       Pulled GradAccumulated Written Prepared Committed

The frames before the bar (|) set up a session. The frames after the bar carry the messages of
servers/protocol/messages.py: one frame for a message about a block, except that Push and Pulled
have a frame for the data of each chunk. An invalid frame raises WireError, and nothing is executed
or unpickled (Rule 8). Further frames are in sums/sum_frames.py and switch/switch_frames.py.

NOTE language. LANGUAGE is a digest of the names, numbers and types of all frames of all packages,
which two processes compare when they connect. tests/house/unit/test_language.py prints the new
digest. Increase EDITION when the meaning of a field changes, but not its type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import replace

from roadtrain.chunks import ITEMSIZE, NUMPY, PAGE, Block, Chunk, ChunkTable
from roadtrain.errors import WireError
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import bit_of, divided, trained
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
    chunk: int  # in Read and Record, -1 stands for the blobs committed with the last step


class StepHeader(NamedTuple):
    step: int


class OpenHeader(NamedTuple):
    """Request of worker 0 to open or make the server's files of the store. The payload describes
    the store.
    """

    new: bool  # whether to make new files (False: open the files)
    step: int  # step of the files to open or make
    servers: int  # number of servers of the store
    holds_gradients: bool  # whether gradients wait for the global norm
    # Step of the snapshot to open, -1 for none. If equal to `step`, new files are filled from it.
    snapshot: int
    given_up: bool  # whether the files that the new files replace are moved aside


class WelcomeHeader(NamedTuple):
    step: int  # newest step of this server's store, -1 without a store
    snapshots: tuple[int, ...]  # steps of this server's snapshots
    every: int  # number of steps between two snapshots, 0 if none are taken
    rests: str  # location of the state, as text


WAITS_ONLY = -1


class ProgressHeader(NamedTuple):
    """The reason why a server keeps its workers waiting (`doing`), and its progress: `done` of `of`
    bytes.

    If `of` is -1, no progress is reported, and `doing` names the peer that does not answer ("" if
    all peers answer).
    """

    doing: str
    done: int
    of: int


class ReadyHeader(NamedTuple):
    step: int  # the last committed step
    members: tuple[int, ...]  # numbers of the servers that take part in the session
    job: str


class BlockHeader(NamedTuple):
    block: int


# In these headers, `chunks` names chunks of the block, as a bitmap of little-endian bytes.


class ChunksHeader(NamedTuple):
    block: int
    chunks: bytes


class PullHeader(NamedTuple):
    block: int
    chunks: bytes
    version: int
    ticket: int


class PulledHeader(NamedTuple):
    ticket: int
    chunk: int


class PushHeader(NamedTuple):
    """A push has a frame with this header for each of its chunks, in the order of the table."""

    block: int
    chunks: bytes
    fresh: bool  # whether the push replaces the held gradient (False: the push is added)
    values: int  # number of values of a sparse gradient; -1 if the gradient is dense
    # dtype of the values of a sparse gradient; for dense gradients, dtype to which those in fp32
    # were downcast, or ""
    dtype: str
    updated: bool  # whether the update that was sent before follows each gradient

    @property
    def dense(self) -> bool:
        return self.values < 0


class CloseHeader(NamedTuple):
    block: int
    chunks: bytes
    step: int


class ApplyUpdateHeader(NamedTuple):
    block: int
    chunks: bytes
    step: int
    order: int
    hyperparameters: dict[int, tuple[float, ...]]  # by parameter group
    with_push: bool  # whether each chunk is updated when its gradient of the next push has arrived


class WrittenHeader(NamedTuple):
    step: int
    # (owner, sum, weighted sum) for each owner; see Note "two sums" in protocol/commit.py
    sums: tuple[tuple[int, int, int], ...]


class FailedHeader(NamedTuple):
    error: str  # name of the exception class
    words: str


NO_FIELDS = tuple[()]
HEADERS: Mapping[int, Any] = {
    OPEN: OpenHeader,
    FILL: ChunkHeader,  # the payload is the chunk's record
    SETTLE: NO_FIELDS,  # the new part is complete; the payload has the blobs of its step
    BEGIN: NO_FIELDS,
    READ: ChunkHeader,
    PULL: PullHeader,
    PUSH: PushHeader,
    CLOSE: CloseHeader,
    APPLY_UPDATE: ApplyUpdateHeader,
    DISCARD_GRAD: ChunksHeader,
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
    GRAD_ACCUMULATED: BlockHeader,
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
    local: int  # workers per host whose gradients are summed first; negative if a relay sums them
    server: int  # number of the server
    signature: str  # digest of the layout


# Prefix of a hello that allows a server to resume without some other servers. An encoded Without
# follows.
WITHOUT = b"roadtrain without "


class Without(NamedTuple):
    job: str
    link: str  # id of the last link of the history (storage/history.py)
    servers: tuple[int, ...]  # the servers that may be absent


class Figures(NamedTuple):
    step: int = -1  # the newest step that all workers have ended
    committed: int = -1
    workers: int = 0  # number of workers of the session, or jobs of a role without sessions
    connected: int = 0  # number of workers, relays or jobs that are connected
    nbytes: int = 0  # memory in use
    budget: int = 0  # memory that may be in use
    stage_nbytes: Mapping[str, int] = {}  # from each stage to the bytes that it has moved
    late: Mapping[str, float] = {}  # from each worker that this process waits for to seconds


# The frame that health.answer sends: (the server's state as text, a dict from each worker to the
# seconds for which it has been waiting and the reason, a dict from each stage to its seconds,
# numbers of the server).
Status = tuple[str, Mapping[str, tuple[float, str]], Mapping[str, float], Figures]
HELLO = msgspec.msgpack.Decoder(Hello)
WITHOUT_REST = msgspec.msgpack.Decoder(Without)
_DECODERS: dict[int, Any] = {}
encode = msgspec.msgpack.Encoder().encode


def declare(headers: Mapping[int, Any]) -> None:
    """Register the header types of kinds of frames."""
    _DECODERS.update({kind: msgspec.msgpack.Decoder(header) for kind, header in headers.items()})


def _shape(kind: Any) -> str:
    """Return a text that describes a type without names of fields, the same in all versions of
    Python.
    """
    if hasattr(kind, "_fields"):
        return f"tuple[{', '.join(map(_shape, get_type_hints(kind).values()))}]"
    inside = ", ".join("..." if arg is ... else _shape(arg) for arg in get_args(kind))
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    return f"{name}[{inside}]" if inside else name


def language_of(words: Mapping[str, Any]) -> bytes:
    """Return a digest (16 bytes) of a mapping from names to types or numbers."""
    lines = [
        f"{name}: {kind if isinstance(kind, (int, str)) else _shape(kind)}"
        for name, kind in sorted(words.items())
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()


EDITION = 3  # NOTE language
LANGUAGE = bytes.fromhex("d317179c63c955e8ba6c372a72ed0dd2")  # NOTE language
T = TypeVar("T")


declare(HEADERS)


def header(kind: int, raw: bytes) -> Any:
    """Decode the header of a frame. Raises WireError if the kind is unknown or the header is
    invalid.
    """
    if kind not in _DECODERS:
        raise WireError(f"a frame has the unknown kind {kind}")
    return decoded(_DECODERS[kind], raw, f"the header of a frame of kind {kind}")


def decoded(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    """Decode bytes with `decoder`. If they are invalid, raises a WireError that begins with
    `what`.
    """
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise WireError(f"{what}: {error}") from error


def as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def bitmap(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def frame(message: Any, table: ChunkTable) -> tuple[int, bytes, Iterable[memoryview]]:
    """Return the frame of a worker's message as (kind, header, payload). Each part of the payload
    of a BlockPush needs a frame of its own.
    """
    match message:
        case messages.BlockPull(block, chunks, version, _, ticket):
            return PULL, encode((block, bitmap(chunks), version, ticket)), ()
        case messages.BlockPush(block, chunks, _, fresh, _, _, dtype, update):
            parts = divided(replace(message, update=None), table.blocks)
            header = block, bitmap(chunks), fresh, -1, dtype, update is not None
            return PUSH, encode(header), (part.sent for part in parts)
        case messages.Push(chunk, (indices, values), fresh, _, _, sums):
            dtype = "fp32" if values.dtype == np.float32 else "16"
            payload = [as_bytes(np.asarray(sums)), as_bytes(indices), as_bytes(values)]
            return PUSH, encode((*_bit(chunk, table), fresh, len(values), dtype, False)), payload
        case messages.Push(chunk, _, fresh):
            header = *_bit(chunk, table), fresh, -1, message.dtype, False
            return PUSH, encode(header), [message.sent]
        case messages.BlockClose(block, chunks, step):
            return CLOSE, encode((block, bitmap(chunks), step)), ()
        case messages.BlockUpdate():
            return update_frame(message)
        case messages.BlockDiscard(block, chunks):
            return DISCARD_GRAD, encode((block, bitmap(chunks))), ()
        case messages.EndStep(step, _, word):
            return END_STEP, encode((step,)), [memoryview(word)] if word else ()
        case messages.Commit(step, blob):
            return COMMIT, encode((step,)), [memoryview(blob)]
        case messages.CommitDone(step):
            return COMMITTED, encode((step,)), ()
    raise AssertionError(message)


def _bit(chunk: int, table: ChunkTable) -> tuple[int, bytes]:
    """Return the block and the bitmap that name a chunk."""
    block = table.blocks[table.chunks[chunk].block]
    return block.index, bitmap(bit_of(block, chunk))


def update_frame(
    update: messages.BlockUpdate, with_push: bool = False
) -> tuple[int, bytes, Sequence[memoryview]]:
    scales = update.scales
    there = np.array([s is not None for s in scales])
    parts = [as_bytes(np.array([0.0 if s is None else s for s in scales])), as_bytes(there)]
    header = update.block, bitmap(update.chunks), update.step, update.order, update.hyper, with_push
    return APPLY_UPDATE, encode(header), parts


def reply(message: Any) -> tuple[int, tuple[Any, ...], bytes | memoryview]:
    """Return the frame of a server's message as (kind, fields, payload)."""
    match message:
        case messages.BlockAccumulated(_, block, sums):
            return GRAD_ACCUMULATED, (block,), as_bytes(sums)
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
    fields: ApplyUpdateHeader, payload: memoryview, block: Block, bits: int, worker: int
) -> messages.BlockUpdate:
    n, groups = len(trained(block)), {run.group for run in block.runs if run.trainable}
    if len(payload) != 9 * n or not groups <= fields.hyperparameters.keys():
        raise WireError(
            f"an update of block {block.index} must have {9 * n} bytes of scales and the"
            f" hyperparameters of groups {sorted(groups)}, but has {len(payload)} bytes and groups"
            f" {sorted(fields.hyperparameters)}"
        )
    there = np.frombuffer(payload, np.uint8, n, 8 * n)
    scales = [float(s) if t else None for s, t in zip(np.frombuffer(payload, np.float64, n), there)]
    return messages.BlockUpdate(
        block.index, bits, fields.step, fields.hyperparameters, scales, fields.order, worker
    )


def push_nbytes(fields: PushHeader, chunk: Chunk, dense: int) -> int:
    """Return the size in bytes that the payload of a push of `chunk` must have.

    `dense` is the size in bytes of a dense gradient that was not downcast.
    """
    if not fields.dense:
        itemsize = 4 if fields.dtype == "fp32" else 2
        return 8 * len(chunk.segments) + fields.values * (4 + itemsize)
    if fields.dtype not in ("", "bf16", "fp16"):
        raise WireError(f"chunk {chunk.id}: a gradient cannot be sent as {fields.dtype!r}")
    dtype = cast_dtype(fields, chunk)
    return round_up(chunk.numel * ITEMSIZE[dtype], PAGE) if dtype else dense


def cast_dtype(fields: PushHeader, chunk: Chunk) -> str:
    """Return the dtype to which a dense gradient of `chunk` was downcast, or ""."""
    return fields.dtype if chunk.dtype == "fp32" else ""


def push(
    fields: PushHeader, payload: memoryview, chunk: Chunk, keep: bool, ticket: int, worker: int
) -> messages.Push:
    fresh, k = fields.fresh, fields.values
    if fields.dense:
        dtype = cast_dtype(fields, chunk)
        return messages.Push(chunk.id, payload, fresh, keep, ticket, None, worker, dtype)
    n = len(chunk.segments)
    sums = np.frombuffer(payload, np.float64, n)
    indices = np.frombuffer(payload, np.uint32, k, 8 * n)
    kind = NUMPY["fp32" if fields.dtype == "fp32" else chunk.dtype]
    values = np.frombuffer(payload, kind, k, 8 * n + 4 * k)
    if k and int(indices.max()) >= chunk.numel:
        raise WireError(
            f"a sparse gradient of chunk {chunk.id} has the index {int(indices.max())}, but the"
            f" chunk has only {chunk.numel} elements"
        )
    return messages.Push(chunk.id, (indices, values), fresh, False, ticket, sums, worker)
