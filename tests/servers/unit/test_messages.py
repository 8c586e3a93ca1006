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

from roadtrain.chunks import PAGE, Chunk, ChunkTable, ParamSpec
from roadtrain.device.pool import BufferPool
from roadtrain.errors import WireError
from roadtrain.servers import frames as m
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.protocol import messages
from roadtrain.units import round_up

CHUNKS = ChunkTable.build(
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
).chunks


def connection(local: int = 1) -> tuple[ParameterConnection, list[Any]]:
    posted: list[Any] = []
    session = SimpleNamespace(
        chunk=lambda number: CHUNKS[number], local=local, post=posted.append, end=posted.append
    )
    made = ParameterConnection(session, 3, None)  # type: ignore[arg-type]
    made.pool = BufferPool(4, max(4 * c.numel for c in CHUNKS))
    return made, posted


def whole(chunk: Chunk) -> memoryview:
    return memoryview(bytearray(i % 251 for i in range(chunk.weights_nbytes)))


def arrive(at: ParameterConnection, message: messages.Push) -> bytes:
    """Deliver a push. Returns its payload on the wire."""
    kind, header, parts = m.frame(message)
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
        7,
        3,
        dtype,
    )
    assert push.sent == sent and len(push.grad) == chunk.weights_nbytes
    push.grad[:] = bytes(chunk.weights_nbytes)  # it is writable and belongs to the connection
    assert server.pool is not None and server.pool.spare == 3
    server.freed(7)
    assert server.pool.spare == 4


def test_successive_gradients_get_their_own_buffers() -> None:
    """The buffer of the next gradient is requested before the current one has arrived."""
    chunk, (server, got) = CHUNKS[0], connection()
    frames = [
        m.frame(
            messages.Push(
                chunk.id, memoryview(bytes([i]) * chunk.weights_nbytes), True, True, i, dtype=dtype
            )
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
        (0, "fp32", 4, r"its fp32 gradient cannot be sent as 'fp32'"),
        (0, "16", 2, r"its fp32 gradient cannot be sent as '16'"),
        (0, "i8", 1, r"its fp32 gradient cannot be sent as 'i8'"),
        (1, "bf16", 2, r"its bf16 gradient cannot be sent as 'bf16'"),
        (1, "fp16", 2, r"its bf16 gradient cannot be sent as 'fp16'"),
        (2, "bf16", 2, "instead of -1"),
    ],
)
def test_a_frame_of_the_wrong_size_is_refused(
    chunk: int, dtype: str, nbytes: int, words: str
) -> None:
    at, posted = connection()
    with pytest.raises(WireError, match=words):
        at.room(m.PUSH, m.encode((chunk, True, 1, -1, dtype)), nbytes * CHUNKS[chunk].numel)
    assert not posted and at.pool is not None and at.pool.spare == 4


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_push_without_a_gradient_is_refused(dtype: str) -> None:
    at, posted = connection()
    at.arrived(m.PUSH, m.encode((0, True, 1, -1, dtype)), memoryview(b""))
    assert (
        len(posted) == 1
        and isinstance(posted[0], WireError)
        and "without a gradient" in str(posted[0])
    )


dtypes = st.one_of(st.sampled_from(["", "bf16", "fp16", "fp32", "16"]), st.text(max_size=20))
things = st.one_of(st.integers(), st.booleans(), dtypes, st.none(), st.floats())


@given(st.integers(0, 2), st.integers(-3, (1 << 63) - 1), dtypes)
def test_any_push_header_has_a_size_that_fits_or_is_refused(
    number: int, k: int, dtype: str
) -> None:
    chunk = CHUNKS[number]
    with contextlib.suppress(WireError):
        fields = m.header(m.PUSH, m.encode((number, True, 1, k, dtype)))
        dense = round_up(chunk.weights_nbytes, PAGE)
        size = m.push_nbytes(fields, chunk, dense)
        assert size >= 0
        if fields[3] < 0:
            assert size == dense // (2 if dtype else 1) and (not dtype or chunk.dtype == "fp32")
            assert dtype in ("", "bf16", "fp16")


def encode(values: list[Any]) -> bytes:
    try:
        return m.encode(tuple(values))
    except (OverflowError, msgspec.MsgspecError):
        return b""


pushes = st.tuples(
    st.integers(0, 2), st.booleans(), st.integers(0, 9), st.integers(-2, 4), dtypes
).map(list)


@given(
    st.one_of(st.binary(max_size=60), st.one_of(st.lists(things, max_size=7), pushes).map(encode))
)
def test_any_bytes_as_a_header_are_a_header_or_a_wire_error(raw: bytes) -> None:
    at, posted = connection()
    with contextlib.suppress(WireError):
        fields = m.header(m.PUSH, raw)
        assert [type(f) for f in fields] == [int, bool, int, int, str]
        if 0 <= fields[0] < len(CHUNKS):
            room = at.room(m.PUSH, raw, CHUNKS[fields[0]].numel * 2)
            at.arrived(m.PUSH, raw, room)
            assert len(posted) == 1
