"""LANGUAGE, which both sides of a link exchange in the handshake, is the digest of all message
definitions."""

from __future__ import annotations

from roadtrain.servers import frames
from roadtrain.sums import sum_frames
from roadtrain.switch import switch_frames

ROOMS = (frames, sum_frames, switch_frames)
# Frames whose names in the digest differ from those in the code: the digest is part of the handshake.
NAMES = {
    "ASK_BEGUN": "ASKED",
    "MISMATCH": "DIFFER",
    "REDUCER_LOST": "GONE",
    "TRIAL_RESULT": "HEARD",
}


def kinds() -> dict[str, int]:
    return {
        NAMES.get(name, name): number
        for room in ROOMS
        for name, number in vars(room).items()
        if type(number) is int and number in room.HEADERS and name != "EDITION"
    }


def test_a_number_is_used_once() -> None:
    numbers = [number for room in ROOMS for number in room.HEADERS]
    assert len(set(numbers)) == len(numbers) == len(kinds())


def test_the_language_is_the_digest_of_the_messages() -> None:  # Rule 8
    """If messages have changed, the failure shows their new digest. A field whose meaning changes
    under the same type needs a new EDITION."""
    headers = {number: header for room in ROOMS for number, header in room.HEADERS.items()}
    words = {f"{name} = {number}": headers[number] for name, number in kinds().items()}
    others = {
        "edition": frames.EDITION,
        "hello": frames.Hello,
        "hello of a summation": sum_frames.SumHello,
        "without": frames.Without,
        "hello of a fan-in": switch_frames.FanInHello,
        "hello to a switch": switch_frames.SwitchHello,
        "rounds": sum_frames.Rounds,
        "status": frames.Status,
        "stalled": sum_frames.Stalled,
    }
    assert frames.language_of(words | others).hex() == frames.LANGUAGE.hex()
