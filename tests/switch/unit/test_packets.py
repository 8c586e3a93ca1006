"""Packets of the fan-in: their layout, and that only the key gives a valid packet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.switch import packets
from roadtrain.switch.packets import (
    HEADER,
    HEADER_NBYTES,
    PACKET_NBYTES,
    PAYLOAD_NBYTES,
    Kind,
    PacketKey,
    siphash,
)
from tests.support.switch_references import reference_siphash, reference_tag

KEY = PacketKey.derive(b"t" * 32, b"n" * 16)
JOB = 77
# From Aumasson and Bernstein's paper (appendix A) and the table of the reference program: the key
# is 0, 1, ..., 15, the message 0, 1, ..., n - 1. Bytes in little-endian order.
SIPHASH = {
    0: "310e0edd47db6f72",
    1: "fd67dc93c539f874",
    2: "5a4fa9d909806c0d",
    7: "37d1018bf50002ab",
    8: "6224939a79f5f593",
    15: "e545be4961ca29a1",
}


def run_of(count: int, *, seed: int = 0, kind: Kind = Kind.GRADIENT, first: int = 5) -> np.ndarray:
    buffer = np.random.default_rng(seed).integers(0, 256, count * PACKET_NBYTES, dtype=np.uint8)
    packets.write_headers(buffer, PACKET_NBYTES, count, kind=kind, job=JOB, first=first, width=4)
    packets.seal(buffer, PACKET_NBYTES, count, KEY)
    return buffer


@pytest.mark.parametrize("nbytes", SIPHASH)
def test_siphash_has_its_published_values(nbytes):
    found = reference_siphash(bytes(range(16)), bytes(range(nbytes)))
    assert found.to_bytes(8, "little").hex() == SIPHASH[nbytes]


@given(key=st.binary(min_size=16, max_size=16), message=st.binary(min_size=24, max_size=24))
@settings(max_examples=50)
def test_the_kernel_of_siphash_equals_its_reference(key, message):
    k, m = np.frombuffer(key, np.uint64), np.frombuffer(message, np.uint64)
    assert int(siphash((k[0], k[1]), (m[0], m[1], m[2]))) == reference_siphash(key, message)


@given(nbytes=st.integers(HEADER_NBYTES, PACKET_NBYTES), seed=st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_the_tag_equals_its_reference(nbytes, seed):
    buffer = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    packets.write_headers(buffer, nbytes, 1, kind=Kind.PARAMETER_BEAT, job=JOB, first=seed)
    packets.seal(buffer, nbytes, 1, KEY)
    header = packets.headers(buffer, nbytes, 1)[0]
    assert int(header["tag"]) == reference_tag(buffer.tobytes(), KEY)
    assert packets.verify(buffer, nbytes, 1, KEY, JOB).all()


@pytest.mark.parametrize("nbytes", [PACKET_NBYTES, HEADER_NBYTES, HEADER_NBYTES + 5])
def test_every_flipped_bit_is_detected(nbytes):  # Rule 8
    clean = run_of(1)[:nbytes].copy()
    packets.seal(clean, nbytes, 1, KEY)
    bits = 8 * nbytes
    flipped = np.tile(clean, (bits, 1))
    where = np.arange(bits)
    flipped[where, where // 8] ^= (1 << (where % 8)).astype(np.uint8)
    assert packets.verify(clean, nbytes, 1, KEY, JOB).all()
    assert not packets.verify(flipped.reshape(-1), nbytes, bits, KEY, JOB).any()
    tags = flipped.copy()  # each sealed again: all tags differ except for flips in the tag itself
    packets.seal(tags.reshape(-1), nbytes, bits, KEY)
    found = packets.headers(tags.reshape(-1), nbytes, bits)["tag"]
    assert len(np.unique(found)) == bits - 64 + 1


def test_a_packet_cut_or_padded_with_zeros_is_invalid():  # Rule 8
    beat = np.zeros(HEADER_NBYTES + 16, np.uint8)
    packets.write_headers(beat, beat.size, 1, kind=Kind.GRADIENT_BEAT, job=JOB, first=3)
    packets.seal(beat, beat.size, 1, KEY)
    assert packets.verify(beat, beat.size, 1, KEY, JOB).all()
    for nbytes in range(HEADER_NBYTES, beat.size):
        assert not packets.verify(beat[:nbytes].copy(), nbytes, 1, KEY, JOB).any()


@pytest.mark.parametrize(
    ("token", "nonce"),
    [(b"u" * 32, b"n" * 16), (b"t" * 32, b"m" * 16), (b"t" * 31, b"tn" * 8), (None, b"n" * 16)],
)
def test_another_token_or_nonce_gives_another_key(token, nonce):  # Rule 8
    assert not packets.verify(
        run_of(3), PACKET_NBYTES, 3, PacketKey.derive(token, nonce), JOB
    ).any()
    again = PacketKey.derive(b"t" * 32, b"n" * 16)
    assert packets.verify(run_of(3), PACKET_NBYTES, 3, again, JOB).all()
    assert not packets.verify(run_of(3), PACKET_NBYTES, 3, again, JOB + 1).any()
    assert "words" not in repr(again)


@pytest.mark.parametrize("segment", [0, 1, HEADER_NBYTES - 1, PACKET_NBYTES + 1, 9000])
def test_impossible_lengths_are_invalid_and_harmless(segment):  # Rule 8
    buffer = np.zeros(9000, np.uint8)
    assert not packets.verify(buffer, segment, 1, KEY, JOB).any()
    assert packets.headers(buffer, segment, 1).size == 1
    with pytest.raises(AssertionError):
        packets.seal(buffer, segment, 1, KEY)


def test_packets_beyond_the_buffer_are_refused():  # Rule 6
    buffer = np.zeros(2 * PACKET_NBYTES, np.uint8)
    for call in (
        lambda: packets.seal(buffer, PACKET_NBYTES, 3, KEY),
        lambda: packets.verify(buffer, PACKET_NBYTES, 3, KEY, JOB),
        lambda: packets.headers(buffer, PACKET_NBYTES, 3),
        lambda: packets.write_headers(buffer, PACKET_NBYTES, -1, kind=1, job=1, first=0),
    ):
        with pytest.raises(AssertionError, match="packets in"):
            call()


def test_a_run_of_other_than_bulk_packets_is_refused():  # Rule 6
    with pytest.raises(AssertionError, match="1455 bytes"):
        packets.copy_in(np.zeros(PACKET_NBYTES - 1, np.uint8), KEY.words.view(np.uint8), 0)


def test_headers_are_read_as_written():
    buffer = np.full(3 * 60, 255, np.uint8)
    most = (1 << 32) - 1
    packets.write_headers(
        buffer, 60, 3, kind=Kind.MAXIMA, job=most, first=(1 << 64) - 5, sender=65535, width=2,
        a=most, b=most - 1, c=most - 1, credit=(1 << 64) - 1,
    )  # fmt: skip
    found = packets.headers(buffer, 60, 3)
    assert found.dtype == HEADER
    for i in range(3):
        c = (most - 1 + i) % (1 << 32)
        assert found[i].item() == (
            0x5254, 1, 4, most, (1 << 64) - 5 + i, 65535, 2, 0, most, most - 1, c, (1 << 64) - 1, 0
        )  # fmt: skip
    assert (buffer.reshape(3, 60)[:, HEADER_NBYTES:] == 255).all()


@given(size=st.integers(0, 4 * PAYLOAD_NBYTES), count=st.integers(0, 4), first=st.integers(0, 5))
@settings(max_examples=60)
def test_payloads_are_pieces_of_the_source_and_zeros(size, count, first):
    source = np.random.default_rng(size).integers(1, 256, size, dtype=np.uint8)
    buffer = np.full(count * PACKET_NBYTES, 255, np.uint8)
    packets.copy_in(buffer, source, first)
    padded = np.zeros((first + count) * PAYLOAD_NBYTES + size, np.uint8)
    padded[:size] = source
    payloads = buffer.reshape(count, PACKET_NBYTES)[:, HEADER_NBYTES:]
    expected = padded[first * PAYLOAD_NBYTES : (first + count) * PAYLOAD_NBYTES]
    assert np.array_equal(payloads.reshape(-1), expected)
    assert (buffer.reshape(count, PACKET_NBYTES)[:, :HEADER_NBYTES] == 255).all()


@given(size=st.integers(0, 4 * PAYLOAD_NBYTES), seed=st.integers(0, 1 << 32))
@settings(max_examples=60)
def test_payloads_in_any_order_are_stored_at_their_place(size, seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, size, dtype=np.uint8)
    buffer = np.zeros(5 * PACKET_NBYTES, np.uint8)
    packets.copy_in(buffer, source, 0)
    order = rng.permutation(5)
    shuffled = buffer.reshape(5, -1)[order].reshape(-1).copy()
    ok = rng.random(5) < 0.7
    into = np.full(size, 7, np.uint8)
    packets.copy_out(shuffled, ok, order.astype(np.uint32), into)
    expected = np.full(size, 7, np.uint8)
    for index in order[ok]:
        piece = slice(index * PAYLOAD_NBYTES, (index + 1) * PAYLOAD_NBYTES)
        expected[piece] = source[piece]
    assert np.array_equal(into, expected)
    far = np.full(5, (1 << 32) - 1, np.uint32)
    packets.copy_out(shuffled, np.ones(5, bool), far, into)
    assert np.array_equal(into, expected)
