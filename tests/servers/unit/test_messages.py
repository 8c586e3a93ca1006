"""Pushes as frames: each arrives unchanged, and a frame that does not fit is a WireError (Rule
8)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from roadtrain.chunks import PAGE, Chunk, ChunkTable, ParamSpec
from roadtrain.device.pool import BufferPool
from roadtrain.errors import WireError
from roadtrain.servers import frames as m
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.protocol import messages
from roadtrain.servers.remote_server import RemoteServer
from roadtrain.units import round_up

TABLE = ChunkTable.build(
    [
        (
            "",
            [
                ParamSpec(f"p{i}", (5000,), dtype, trainable, 0)
                for i, (dtype, trainable) in enumerate(
                    [("fp32", True), ("bf16", True), ("fp32", False)]
                )
            ],
        )
    ]
)
CHUNKS = TABLE.chunks


def connection(local: int = 1) -> tuple[ParameterConnection, list[Any]]:
    posted: list[Any] = []
    session = SimpleNamespace(
        chunk=lambda number: CHUNKS[number],
        blocks=TABLE.blocks,
        local=local,
        post=posted.append,
        end=posted.append,
    )
    made = ParameterConnection(session, 3, None)  # type: ignore[arg-type]
    made.pool = BufferPool(4, max(4 * c.numel for c in CHUNKS))
    return made, posted


def whole(chunk: Chunk) -> memoryview:
    return memoryview(bytearray(i % 251 for i in range(chunk.weights_nbytes)))


def head(chunk: int, k: int = -1, dtype: str = "", updated: bool = False) -> bytes:
    """The header of a push of one chunk."""
    return m.encode((0, m.bitmap(1 << chunk), True, k, dtype, updated))


def arrive(at: ParameterConnection, message: messages.Push) -> bytes:
    """Deliver a push. Returns its payload on the wire."""
    kind, header, parts = m.frame(message, TABLE)
    data = b"".join(parts)
    room = at.room(kind, header, len(data))
    room[:] = data
    at.arrived(kind, header, room)
    return data


@pytest.mark.parametrize("dtype", ["", "bf16", "fp16"])
def test_a_downcast_gradient_takes_half_the_bytes(dtype: str) -> None:
    """From a worker through a relay, which forwards it unchanged, to a server, which has room for
    its fp32 sum."""
    chunk, (relay, passing), (server, got) = CHUNKS[0], connection(), connection()
    grad = whole(chunk)
    sent = arrive(relay, messages.Push(chunk.id, grad, True, True, 7, dtype=dtype))
    assert sent == bytes(grad[: chunk.numel * (2 if dtype else 4)])
    assert arrive(server, passing[0]) == sent
    (push,) = got
    assert (push.chunk, push.fresh, push.ticket, push.worker, push.dtype) == (
        chunk.id,
        True,
        1,
        3,
        dtype,
    )
    assert push.sent == sent and len(push.grad) == chunk.weights_nbytes
    push.grad[:] = bytes(chunk.weights_nbytes)  # it is writable and belongs to the connection
    assert server.pool is not None and server.pool.spare == 3
    server.freed(push.ticket)
    assert server.pool.spare == 4


def test_successive_gradients_get_their_own_buffers() -> None:
    """The buffer of the next gradient is requested before the current one has arrived."""
    chunk, (server, got) = CHUNKS[0], connection()
    frames = [
        m.frame(
            messages.Push(
                chunk.id, memoryview(bytes([i]) * chunk.weights_nbytes), True, True, i, dtype=dtype
            ),
            TABLE,
        )
        for i, dtype in enumerate(("bf16", "", "fp16"))
    ]
    rooms = [server.room(kind, header, sum(map(len, parts))) for kind, header, parts in frames]
    for room, (kind, header, parts) in zip(rooms, frames):
        room[:] = b"".join(parts)
        server.arrived(kind, header, room)
    assert [bytes(push.sent) for push in got] == [b"".join(parts) for _, _, parts in frames]


@pytest.mark.parametrize(
    ("chunk", "dtype", "nbytes", "words"),
    [
        (0, "bf16", 4, "instead of"),
        (0, "bf16", 1, "instead of"),
        (0, "", 2, "instead of"),
        (0, "fp32", 4, r"a gradient cannot be sent as 'fp32'"),
        (0, "16", 2, r"a gradient cannot be sent as '16'"),
        (0, "i8", 1, r"a gradient cannot be sent as 'i8'"),
        (1, "bf16", 1, "instead of"),
        (2, "bf16", 2, "instead of -1"),
    ],
)
def test_a_frame_of_the_wrong_size_is_refused(
    chunk: int, dtype: str, nbytes: int, words: str
) -> None:
    at, posted = connection()
    with pytest.raises(WireError, match=words):
        at.room(m.PUSH, head(chunk, dtype=dtype), nbytes * CHUNKS[chunk].numel)
    assert not posted and at.pool is not None and at.pool.spare == 4


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_push_without_a_gradient_is_refused(dtype: str) -> None:
    at, posted = connection()
    at.arrived(m.PUSH, head(0, dtype=dtype), memoryview(b""))
    assert (
        len(posted) == 1
        and isinstance(posted[0], WireError)
        and "without a gradient" in str(posted[0])
    )


dtypes = st.one_of(st.sampled_from(["", "bf16", "fp16", "fp32", "16"]), st.text(max_size=20))
bitmaps = st.one_of(st.integers(0, 9).map(m.bitmap), st.binary(max_size=3))
things = st.one_of(st.integers(), st.booleans(), dtypes, st.none(), st.floats(), bitmaps)


@given(st.integers(0, 2), st.integers(-3, (1 << 63) - 1), dtypes)
def test_any_push_header_has_a_size_that_fits_or_is_refused(
    number: int, k: int, dtype: str
) -> None:
    chunk = CHUNKS[number]
    with contextlib.suppress(WireError):
        fields = m.header(m.PUSH, head(number, k, dtype))
        dense = round_up(chunk.weights_nbytes, PAGE)
        size = m.push_nbytes(fields, chunk, dense)
        assert size >= 0
        if k < 0:
            assert size == dense // (2 if dtype and chunk.dtype == "fp32" else 1)
            assert dtype in ("", "bf16", "fp16")


def encode(values: list[Any]) -> bytes:
    try:
        return m.encode(tuple(values))
    except (OverflowError, msgspec.MsgspecError):
        return b""


pushes = st.tuples(
    st.integers(-1, 1), bitmaps, st.booleans(), st.integers(-2, 4), dtypes, st.booleans()
).map(list)


@given(
    st.one_of(st.binary(max_size=60), st.one_of(st.lists(things, max_size=7), pushes).map(encode))
)
def test_any_bytes_as_a_header_are_a_header_or_a_wire_error(raw: bytes) -> None:
    at, posted = connection()
    with contextlib.suppress(WireError):
        fields = m.header(m.PUSH, raw)
        assert [type(f) for f in fields] == [int, bytes, bool, int, str, bool]
        _, bits = at.named(fields)
        first = CHUNKS[(bits & -bits).bit_length() - 1]
        room = at.room(m.PUSH, raw, first.numel * 2)
        at.arrived(m.PUSH, raw, room)
        assert len(posted) == 1 + fields.updated  # no update precedes: the session ends


def test_a_push_has_a_frame_for_each_of_its_chunks() -> None:
    """They arrive in the order of the table, and each is followed by the update of its chunk."""
    at, got = connection()
    block, flat = TABLE.blocks[0], bytes(range(256)) * (TABLE.blocks[0].push_nbytes // 256)
    update = messages.BlockUpdate(0, 2, 5, {0: (0.1,)}, (1.0, 0.5), 3)
    push = messages.BlockPush(0, 3, memoryview(flat), True, True, 9, "", update)
    kind, header, parts = m.update_frame(update, with_push=True)
    at.arrived(kind, header, memoryview(b"".join(parts)))
    assert not got, "the update waits for the gradients"
    kind, header, parts = m.frame(push, TABLE)
    for part in parts:
        room = at.room(kind, header, len(part))
        room[:] = part
        at.arrived(kind, header, room)
    first, second, after = got
    assert [p.chunk for p in (first, second)] == [0, 1]
    for pushed, chunk in zip((first, second), block.trainable):
        whole = flat[chunk.push_offset : chunk.push_offset + len(pushed.grad)]
        assert bytes(pushed.grad) == whole and pushed.worker == 3
    assert after == replace(update, scales=[1.0, 0.5], worker=3)


@pytest.mark.parametrize("kind", [m.PULL, m.CLOSE, m.DISCARD_GRAD])
@pytest.mark.parametrize("block", [(-1, b"\1"), (1, b"\1"), (0, b""), (0, b"\0"), (0, b"\x08")])
def test_a_message_about_chunks_that_do_not_exist_is_refused(
    kind: int, block: tuple[int, bytes]
) -> None:  # Rule 8
    at, posted = connection()
    rest = {m.PULL: (0, 1), m.CLOSE: (1,), m.DISCARD_GRAD: ()}[kind]
    at.arrived(kind, m.encode((*block, *rest)), memoryview(b""))
    assert [type(error) for error in posted] == [WireError]


def test_a_block_has_arrived_with_its_last_chunk() -> None:
    """A chunk that was not pulled, or that arrives again, is refused (Rule 8)."""
    got: list[Any] = []
    server, sent = (
        RemoteServer(0, "server 0", {}, TABLE),
        SimpleNamespace(send=lambda *a, **k: None),
    )
    server.link, server.deliver = sent, got.append  # type: ignore[assignment]
    memory = memoryview(bytearray(TABLE.blocks[0].pull_nbytes))
    server.send(messages.BlockPull(0, 0b101, 0, memory, 4))

    def arrive(ticket: int, chunk: int) -> None:
        header, nbytes = m.encode((ticket, chunk)), round_up(CHUNKS[chunk].weights_nbytes, PAGE)
        room = server.room(m.PULLED, header, nbytes)
        room[:] = bytes([chunk + 1]) * nbytes
        server.arrived(m.PULLED, header, room)

    arrive(4, 2)
    for ticket, chunk in ((4, 1), (4, 2), (5, 0)):
        with pytest.raises(WireError, match="not awaited"):
            arrive(ticket, chunk)
    assert not got
    arrive(4, 0)
    assert got == [messages.BlockPulled(4)]
    first, last = CHUNKS[0].offset, CHUNKS[2].offset
    assert (memory[first], memory[last]) == (1, 3)
