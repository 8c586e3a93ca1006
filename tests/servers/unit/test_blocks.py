"""Messages about blocks are divided into messages about chunks and gathered again, and the answers
about chunks become one answer, in whatever order they come."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from roadtrain.chunks import PAGE, SEGMENT, ChunkTable, ParamSpec
from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.blocks import (
    BlockAnswers,
    bit_of,
    chunks_in,
    divided,
    gathered,
    trained,
)

TABLE = ChunkTable.build(
    [
        ("root", [ParamSpec("r", (8,), "fp32", True, 0)]),
        (
            "one",
            [
                ParamSpec("a", (2, SEGMENT), "fp32", True, 0),
                ParamSpec("frozen", (16,), "bf16", False, -1),
                ParamSpec("b", (3, SEGMENT), "bf16", True, 1),
                ParamSpec("c", (100,), "fp32", True, 0),
            ],
        ),
    ],
    SEGMENT,
)
BLOCK = TABLE.blocks[1]
TRAINABLE = sum(bit_of(BLOCK, chunk.id) for chunk in BLOCK.trainable)


def parts_of(message: Any) -> list[Any]:
    return [*divided(message, TABLE.blocks)]


def test_a_pull_is_divided_into_places_of_one_buffer() -> None:
    """The chunks lie where the table says, also if the buffer begins in the middle of the block."""
    memory = memoryview(bytearray(BLOCK.pull_nbytes))
    every = (1 << len(BLOCK.chunks)) - 1
    for part, chunk in zip(
        parts_of(m.BlockPull(1, every, 4, memory, 9)), BLOCK.chunks, strict=True
    ):
        assert (part.chunk, part.version, part.ticket) == (chunk.id, 4, 9)
        part.into[:4] = chunk.id.to_bytes(4, "little")
        assert memory[chunk.offset : chunk.offset + 4] == chunk.id.to_bytes(4, "little")
    last = BLOCK.chunks[-1]
    pull = m.BlockPull(
        1, bit_of(BLOCK, last.id), 4, memoryview(bytearray(PAGE * 64)), 9, last.offset
    )
    [part] = parts_of(pull)
    assert part.chunk == last.id and len(part.into) % PAGE == 0


def test_a_push_is_followed_chunk_by_chunk_by_its_update() -> None:
    """Only fp32 gradients are downcast, and a chunk without an update has none."""
    grad = memoryview(bytearray(BLOCK.push_nbytes))
    without = BLOCK.trainable[1].id
    scales = [float(param) for param in trained(BLOCK)]
    hyper = {0: (0.1,), 1: (0.2,)}
    update = m.BlockUpdate(1, TRAINABLE & ~bit_of(BLOCK, without), 5, hyper, scales, 3, 2)
    parts = parts_of(m.BlockPush(1, TRAINABLE, grad, True, False, 7, "bf16", update, 2))
    order = [(type(part).__name__, part.chunk) for part in parts]
    expected = []
    for chunk in BLOCK.trainable:
        expected += [("Push", chunk.id), ("ApplyUpdate", chunk.id)]
    expected.remove(("ApplyUpdate", without))
    assert order == expected
    for part in parts:
        chunk = TABLE.chunks[part.chunk]
        assert part.worker == 2
        if isinstance(part, m.Push):
            assert part.dtype == ("bf16" if chunk.dtype == "fp32" else "")
        else:
            assert part.hyper == hyper[chunk.group]
            assert list(part.scales) == [float(span.param) for span in chunk.spans]


@pytest.mark.parametrize("seed", range(20))
def test_gathered_messages_keep_the_order_of_each_chunk(seed: int) -> None:
    """Dividing them again gives the same messages about each chunk, and messages that belong
    together become one."""
    rng, sent = random.Random(seed), []
    running: dict[int, list[Any]] = {}
    for chunk in BLOCK.trainable:
        of_chunk: list[Any] = [m.Pull(chunk.id, 2, None, 6), m.Close(chunk.id, 3)]
        scales = [0.5 * span.param for span in chunk.spans]
        of_chunk.append(m.ApplyUpdate(chunk.id, 3, (float(chunk.group),), scales, 1))
        if rng.random() < 0.5:
            of_chunk.append(m.DiscardGrad(chunk.id))
        if rng.random() < 0.5:
            of_chunk.append(m.Close(chunk.id, 4))
        running[chunk.id] = of_chunk
    left = {number: [*of_chunk] for number, of_chunk in running.items()}
    while left:
        number = rng.choice(list(left))
        sent.append(left[number].pop(0))
        if not left[number]:
            del left[number]
    whole = gathered(sent, TABLE)
    again: dict[int, list[Any]] = {number: [] for number in running}
    for message in whole:
        for part in parts_of(message):
            again[part.chunk].append(part)
    assert again == running
    in_turn = [event for i in range(5) for of in running.values() for event in of[i : i + 1]]
    assert [type(message) for message in gathered(in_turn, TABLE)[:3]] == [
        m.BlockPull,
        m.BlockClose,
        m.BlockUpdate,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_message_gets_one_answer(seed: int) -> None:
    """Two workers pull and push; the sums of later gradients of a chunk may come before the first
    sums of another chunk."""
    rng = random.Random(seed)
    held = {chunk.id for chunk in BLOCK.chunks if rng.random() < 0.8} | {BLOCK.chunks[0].id}
    answers = BlockAnswers(4, TABLE.blocks, held, lambda sums: [x for part in sums for x in part])
    bits = sum(bit_of(BLOCK, number) for number in held)
    trainable = [c.id for c in chunks_in(BLOCK, bits & TRAINABLE)]
    left: list[list[tuple[Any, int | None]]] = []
    for worker in (0, 1):
        for ticket in (1, 2):
            answers.divided(m.BlockPull(1, bits, 0, None, ticket, 0, worker))
            left += [[(m.Pulled(ticket, number), worker)] for number in held]
        answers.divided(m.BlockPush(1, bits & TRAINABLE, None, True, True, 1, worker=worker))
        left += [[(m.BufferFree(1), worker)] for _ in trainable]
    for number in trainable:
        left.append([(m.GradAccumulated(number, (number, i)), None) for i in range(3)])
    answers.check()
    got: Counter[Any] = Counter()
    sums = []
    while left:
        at = rng.randrange(len(left))
        message, to = left[at].pop(0)
        if not left[at]:
            del left[at]
        joined = answers.joined(message, to)
        answers.check()
        if isinstance(joined, m.BlockAccumulated):
            sums.append(joined)
        elif joined is not None:
            got[joined, to] += 1
    answered = {(m.BlockPulled(ticket), worker) for ticket in (1, 2) for worker in (0, 1)}
    assert got == Counter(answered | {(m.BufferFree(1), worker) for worker in (0, 1)})
    assert sums == [
        m.BlockAccumulated(4, 1, [x for number in trainable for x in (number, i)]) for i in range(3)
    ]
    for unknown in (m.BufferFree(1), m.Pulled(1, BLOCK.chunks[0].id)):
        assert answers.joined(unknown, 0) == unknown, (
            "it belongs to no message that is not answered"
        )
