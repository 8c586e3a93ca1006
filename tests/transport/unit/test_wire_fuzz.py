"""Any bytes on the wire give only typed errors, in time, and allocate no memory beyond the frame
limit (Rule 8)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roadtrain.errors import PeerError, WireError
from roadtrain.transport import handshake, tcp
from roadtrain.transport.link import (
    HEAD_NBYTES,
    LAST,
    SUMMED,
    Head,
    digest,
    pack_head,
    parse_head,
    sealed,
)
from roadtrain.transport.stream import FrameStream
from roadtrain.units import KIB

LIMIT = 64 * KIB
TOKEN = b"a secret of the job"
WAIT_S = 5.0
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

heads = st.builds(
    Head,
    st.sampled_from([0, 0, 0, SUMMED, LAST, 255]),
    st.integers(0, 65535),
    st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, 4), st.integers(0, 2**64 - 1)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)


def packed(number: int, header: bytes, payload: bytes, summed: bool) -> bytes:
    """A valid frame."""
    sums = (digest((header,)), digest((payload,))) if summed else (0, 0)
    head = Head(SUMMED if summed else 0, number, len(header), len(payload), number, *sums)
    return pack_head(head) + header + payload


@st.composite
def valid_streams(draw) -> bytes:
    """Some valid frames, mostly followed by a goodbye."""
    out, n, summed = b"", draw(st.integers(0, 5)), draw(st.booleans())
    for i in range(n):
        out += packed(i, draw(st.binary(max_size=60)), draw(st.binary(max_size=200)), summed)
    last = LAST | (SUMMED if summed else 0)
    return out + (pack_head(Head(last, 0, 0, 0, n)) if draw(st.booleans()) else b"")


@st.composite
def spoiled_streams(draw, streams) -> bytes:
    """A valid stream with some bytes changed, inserted or removed."""
    data = bytearray(draw(streams))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["change", "insert", "cut", "drop"]))
        if how == "change" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=50))
        elif how == "cut":
            del data[at:]
        else:
            del data[at : at + draw(st.integers(0, 50))]
    return bytes(data)


anything = st.one_of(
    st.binary(max_size=300),
    heads.map(pack_head),
    valid_streams(),
    spoiled_streams(valid_streams()),
    st.lists(heads.map(pack_head), max_size=4).map(b"".join),
)


class Bytes:
    """A channel whose peer sends `data` and hangs up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._down = data, 0, False

    def send(self, buffers) -> int:
        return sum(map(len, buffers))

    def recv_into(self, view: memoryview, whole: bool) -> int:
        n = 0 if self._down else min(len(view), len(self._data) - self._at)
        view[:n] = self._data[self._at : self._at + n]
        self._at += n
        return n

    def shutdown(self) -> None:
        self._down = True

    def close(self) -> None: ...


class Counter:
    def __init__(self) -> None:
        self.largest_room, self.kinds, self.errors, self.done = 0, [], [], threading.Event()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        assert 0 < nbytes <= LIMIT
        self.largest_room = max(self.largest_room, nbytes)
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        assert not self.errors
        self.kinds.append(kind)

    def lost(self, error: PeerError) -> None:
        self.errors.append(error)
        self.done.set()


def run(*data: bytes, summed: bool = False) -> Counter:
    got, link = Counter(), FrameStream("the peer", LIMIT, summed, 1.0)
    link.start(got, [Bytes(each) for each in data])
    assert got.done.wait(WAIT_S), "it hangs"
    link.close()
    assert len(got.errors) == 1
    assert isinstance(got.errors[0], PeerError)
    assert "the peer" in str(got.errors[0])
    assert "this side failed" not in str(got.errors[0]), got.errors[0]
    return got


@FUZZ
@given(st.binary(min_size=HEAD_NBYTES, max_size=HEAD_NBYTES), st.booleans())
def test_a_head_parses_or_is_refused(raw, summed):
    with contextlib.suppress(PeerError):
        head = parse_head(memoryview(raw), LIMIT, summed)
        assert head.nbytes <= LIMIT
        assert pack_head(head)[:-8] == raw[:-8]  # the last eight bytes are its checksum


@FUZZ
@given(anything, st.booleans())
@pytest.mark.slow
def test_any_bytes_on_one_connection_end_in_a_typed_error(data, summed):
    run(data, summed=summed)


@FUZZ
@given(anything, anything, anything)
@pytest.mark.slow
def test_any_bytes_on_three_connections_end_in_a_typed_error(a, b, c):
    run(a, b, c)


@FUZZ
@given(
    st.lists(st.tuples(st.binary(max_size=60), st.binary(max_size=200)), max_size=5),
    st.booleans(),
    st.booleans(),
)
@pytest.mark.slow
def test_good_frames_arrive_before_the_end(frames, goodbye, summed):
    data = b"".join(
        packed(i, header, payload, summed) for i, (header, payload) in enumerate(frames)
    )
    last = pack_head(Head(LAST | (SUMMED if summed else 0), 0, 0, 0, len(frames)))
    got = run(data + (last if goodbye else b""), summed=summed)
    assert got.kinds == list(range(len(frames)))
    assert ("closed by peer" if goodbye else "without a goodbye") in str(got.errors[0])


@FUZZ
@given(
    st.lists(st.tuples(st.binary(max_size=60), st.binary(max_size=200)), min_size=1, max_size=5),
    st.data(),
)
@pytest.mark.slow
def test_only_frames_before_a_flipped_bit_arrive(frames, data):
    whole = [packed(i, header, payload, True) for i, (header, payload) in enumerate(frames)]
    sent = bytearray(b"".join(whole))
    flips = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(sent) - 1), st.integers(0, 7)),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    for at, bit in flips:
        sent[at] ^= 1 << bit
    first = min(at for at, _ in flips)
    good = next(i for i in range(len(whole)) if first < sum(map(len, whole[: i + 1])))
    got = run(bytes(sent), summed=True)
    assert got.kinds == list(range(good))
    assert isinstance(got.errors[0], WireError)


# The handshake on a real socket: the listener must keep serving a valid client


class Sink:
    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise AssertionError

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None: ...

    def lost(self, error: PeerError) -> None: ...


@pytest.fixture(scope="module")
def listener():
    reports: list[str] = []
    options = tcp.TcpOptions(token=TOKEN, handshake_s=2.0, frame_limit=LIMIT)
    made = tcp.listen(("127.0.0.1", 0), lambda link, hello: Sink(), options, reports.append)
    yield made
    tcp.connect(made.address, Sink(), options).close()
    made.close()
    assert not [line for line in reports if "Error(" in line or "\n" in line]


def greetings() -> st.SearchStrategy[bytes]:
    good = st.builds(
        handshake.Greeting,
        st.just(handshake.MAGIC),
        st.sampled_from([0, 1, 2, 2, 2, 3]),
        st.booleans(),
        st.booleans(),
        st.integers(0, 65535),
        st.integers(0, 65535),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=32, max_size=32),
        st.sampled_from([handshake.NO_LANGUAGE, b"x" * 16]),
        st.integers(0, 2**32 - 1),
        st.binary(min_size=32, max_size=32),
    )
    return good.map(lambda greeting: sealed(handshake.GREETING.pack(*greeting)))


@settings(FUZZ, max_examples=100)
@given(
    st.one_of(
        st.binary(max_size=400),
        greetings(),
        spoiled_streams(greetings()),
        st.tuples(greetings(), st.binary(max_size=200)).map(b"".join),
    )
)
def test_a_client_that_sends_any_other_bytes_is_disconnected(listener, data):
    with socket.create_connection(listener.address) as sock:
        sock.settimeout(WAIT_S)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except OSError as error:
            assert not isinstance(error, TimeoutError), "it hangs"


@settings(FUZZ, max_examples=100)
@given(
    st.one_of(
        st.binary(max_size=400),
        greetings(),
        spoiled_streams(greetings()),
        st.tuples(greetings(), st.binary(max_size=100)).map(b"".join),
    ),
    st.booleans(),
)
def test_a_server_that_sends_any_other_bytes_is_a_typed_error(data, with_token):
    ours, theirs = socket.socketpair()
    token, deadline = TOKEN if with_token else None, time.monotonic() + WAIT_S
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        options = tcp.TcpOptions(token=token)
        try:
            greeting = handshake.greeting(options, token, bytes(16))
            answer = handshake.client_greet(ours, greeting, token, b"hello", deadline)
            handshake.client_verdict(ours, answer, deadline)
        except (PeerError, OSError) as error:
            assert isinstance(handshake.as_peer_error(error, "the server"), PeerError)
        else:
            raise AssertionError("random bytes proved the token")
    assert time.monotonic() < deadline
