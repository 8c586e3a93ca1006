"""The phases of a chunk, a slot and a relay's copy follow their transition tables, and every
transition in a table occurs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_server_machine import World, _run_sequence

from roadtrain.servers.protocol import chunk_state, messages, prefetch
from roadtrain.servers.protocol.chunk_state import ChunkPhase, ChunkState, Resident
from roadtrain.servers.protocol.prefetch import Prefetcher, Slot, SlotPhase
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.servers.protocol.server_steps import ServerSpec


def record_transitions(monkeypatch: pytest.MonkeyPatch, kind: type) -> set[tuple[Any, Any]]:
    """Record (phase, next phase) of all objects of `kind` from now on."""
    seen: set[tuple[Any, Any]] = set()
    enter = kind.enter  # type: ignore[attr-defined]

    def recording(self: Any, phase: Any) -> None:
        before = self.phase
        enter(self, phase)
        seen.add((before, phase))

    monkeypatch.setattr(kind, "enter", recording)
    return seen


def steps_of(table: Any) -> set[tuple[Any, Any]]:
    return {(phase, following) for phase, many in table.items() for following in many}


def train(machine: ServerStateMachine, seed: int) -> None:
    """Run three steps of a worker, with pulls at random moments."""
    world, rng = World(machine, seed), random.Random(seed)
    for step in range(1, 4):
        for chunk in machine.chunks:
            world.feed(messages.Pull(chunk, step - 1, None, 1000 * step + chunk))
            world.feed(messages.Push(chunk, None, True, True, 100 * step + chunk))
            world.feed(messages.ApplyUpdate(chunk, step, (), [1.0], chunk))
            world.feed(messages.Pull(chunk, step - 1, None, 2000 * step + chunk))
            if world.todo and rng.random() < 0.7:
                world.run_one()
        world.feed(messages.EndStep(step))
        world.feed(messages.Commit(step, b""))
        while world.todo and rng.random() < 0.9:
            world.run_one()
    world.drain()
    assert machine.committed == 3
    assert all(chunk.phase is ChunkPhase.IDLE for chunk in machine.chunks.values())


@pytest.mark.slow
def test_every_transition_of_a_chunk_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_transitions(monkeypatch, ChunkState)
    for seed in range(20):
        kinds = random.Random(seed).choices(list(Resident), k=6)
        train(ServerStateMachine(ServerSpec(0, dict(enumerate(kinds)), 2, durable=True)), seed)
        in_memory = dict.fromkeys(range(6), Resident.RECORD)
        train(ServerStateMachine(ServerSpec(0, in_memory, 0, durable=False)), seed)
    assert seen == steps_of(chunk_state.NEXT_PHASES)


def test_every_transition_of_a_slot_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_transitions(monkeypatch, Slot)
    prefetcher = Prefetcher(3, range(6))
    for _ in range(3):
        _run_sequence(prefetcher, [*range(6), *reversed(range(6))])
        prefetcher.updated(range(6))
    for pull in prefetcher.request(0):
        prefetcher.arrived(pull.slot)
    assert prefetcher.use(0) == prefetcher.use(0)  # two passes at once
    assert seen == steps_of(prefetch.NEXT_PHASES)


def test_an_invalid_transition_is_an_error() -> None:
    chunk = ChunkState(Resident.NOTHING)
    with pytest.raises(AssertionError, match="cannot become"):
        chunk.enter(ChunkPhase.WRITING)
    with pytest.raises(AssertionError, match="cannot become"):
        Slot().enter(SlotPhase.USED)
