"""Frames, handshakes and codecs are unchanged byte for byte."""

from __future__ import annotations

import cases
import fixtures
import pytest
import surface

FRAMES = fixtures.load("frames.json")
MESSAGES = fixtures.load_packed("messages.json.gz")
SUMS = fixtures.load_packed("sums.json.gz")


@pytest.mark.parametrize("name", FRAMES["headers"])
def test_headers(name: str) -> None:
    kept = FRAMES["headers"][name]
    raw = bytes.fromhex(kept["hex"])
    fields = surface.header(kept["kind"], raw)
    assert fixtures.plain(fields) == kept["values"]
    assert surface.encoded(fields) == raw


@pytest.mark.parametrize("name", FRAMES["besides"])
def test_structures_besides_headers(name: str) -> None:
    kept = FRAMES["besides"][name]
    raw = bytes.fromhex(kept["hex"])
    found = surface.besides(name, raw)
    assert fixtures.plain(found) == kept["values"]
    assert surface.encoded(found) == raw


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    """Messages as a worker sends them, and as a relay forwards them after decoding."""
    kind, header, payload = MESSAGES[name]
    assert in_hex(*surface.messages()[name]) == [kind, header, payload]
    again = surface.read_and_rebuilt(name, kind, bytes.fromhex(header), bytes.fromhex(payload))
    assert in_hex(*again) == [kind, header, payload]


def in_hex(kind: int, header: bytes, parts: object) -> list[object]:
    return [kind, header.hex(), b"".join(map(bytes, parts)).hex()]  # type: ignore[call-overload]


def test_every_message_is_kept() -> None:
    assert surface.messages().keys() == MESSAGES.keys()


def test_heads_of_frames() -> None:
    assert surface.heads() == FRAMES["heads"]


def test_handshakes() -> None:
    assert surface.handshake() == FRAMES["handshake"]


def test_frames_of_a_reducer() -> None:
    assert cases.summed() == SUMS["summed"]


def test_codecs() -> None:
    assert cases.codecs() == SUMS["codecs"]
