"""stages/protocol/pipeline.py with different numbers of replicas per stage: no rank waits for ever,
memory is bounded, and receives can be posted ahead in the order of the sends (NCCL's rule)."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    Peer,
    PipelineShape,
    RunBlocks,
    StageStateMachine,
    Transfer,
)

Rank = tuple[int, int]  # (stage, replica)
Channel = tuple[int, str, Rank, Rank]  # (boundary, direction, sender, receiver)


@dataclass
class Pipeline:
    """The state machines of all ranks of all stages, on a virtual clock."""

    widths: Sequence[int]
    num_microbatches: int
    parts: int = 1
    now: Fraction = Fraction()
    ends: list[tuple[Fraction, int, str, Rank, object]] = field(default_factory=list)
    held: dict[Rank, int] = field(default_factory=lambda: defaultdict(int))
    most_held: dict[Rank, int] = field(default_factory=lambda: defaultdict(int))
    ran: list[tuple[Rank, RunBlocks]] = field(default_factory=list)
    # transfers in the order of their sends
    sent: dict[Channel, list[Transfer]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        stages = len(self.widths)
        self.numbers = itertools.count()
        self.machines = {
            (stage, replica): StageStateMachine(
                PipelineShape(stage, replica, tuple(self.widths), self.parts, self.num_microbatches)
            )
            for stage in range(stages)
            for replica in range(self.widths[stage])
        }

    def after(self, seconds: Fraction, what: str, rank: Rank, about: object) -> None:
        heapq.heappush(self.ends, (self.now + seconds, next(self.numbers), what, rank, about))

    def begin(self, rank: Rank, runs: list[RunBlocks], seconds: dict[str, Fraction]) -> None:
        for run in runs:
            if run.what == FORWARD:
                self.held[rank] += 1
                self.most_held[rank] = max(self.most_held[rank], self.held[rank])
            self.after(seconds[run.what], "ran", rank, run)

    def end(self, rank: Rank, run: RunBlocks, delay: Fraction) -> list[RunBlocks]:
        machine = self.machines[rank]
        self.ran.append((rank, run))
        self.held[rank] -= run.what == BACKWARD
        to = machine.consumer(run)
        if to is not None:
            self.after(delay, "arrived", (to.stage, to.replica), (run, to))
            boundary = rank[0] if run.what == FORWARD else to.stage
            channel = boundary, run.what, rank, (to.stage, to.replica)
            sender = Peer(rank[0], run.part, rank[1])
            self.sent[channel].append(Transfer(run.what, run.micro, boundary, sender, to))
        return machine.ended(run)


def random_run(pipeline: Pipeline, random: Random) -> None:
    """Run with random durations of runs and deliveries, so that messages overtake each other."""

    def some() -> Fraction:
        return Fraction(random.choice((0, 1, 1, 2, 3, 7, 20)), 3)

    def begin(rank: Rank, runs: list[RunBlocks]) -> None:
        pipeline.begin(rank, runs, {FORWARD: some(), BACKWARD: some()})

    for rank, machine in pipeline.machines.items():
        begin(rank, machine.start())
    while pipeline.ends:
        pipeline.now, _, what, rank, about = heapq.heappop(pipeline.ends)
        if what == "ran":
            assert isinstance(about, RunBlocks)
            begin(rank, pipeline.end(rank, about, some()))
        else:
            assert isinstance(about, tuple)
            run, to = about
            begin(rank, pipeline.machines[rank].arrived(run.what, run.micro, to.part))
        for machine in pipeline.machines.values():
            machine.check()


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 24),
    st.randoms(use_true_random=False),
)
def test_stages_of_any_widths_finish(
    widths: list[int], num_microbatches: int, random: Random
) -> None:
    """Including fewer micro-batches than replicas, some of which are then idle. No rank waits for a
    message that never arrives (Rule 5), and held activations are bounded (Rule 4)."""
    pipeline = Pipeline(widths, num_microbatches)
    random_run(pipeline, random)
    assert all(machine.finished for machine in pipeline.machines.values())
    assert sorted((rank[0], run.what, run.micro) for rank, run in pipeline.ran) == sorted(
        (stage, what, micro)
        for stage in range(len(widths))
        for what in (FORWARD, BACKWARD)
        for micro in range(num_microbatches)
    )
    assert all(run.micro % widths[rank[0]] == rank[1] for rank, run in pipeline.ran)
    for (stage, replica), most in pipeline.most_held.items():
        assert most == PipelineShape(stage, replica, tuple(widths), 1, num_microbatches).ahead


def transfers_by_channel(
    pipeline: Pipeline, rank: Rank, ahead_of: bool
) -> dict[Channel, list[Transfer]]:
    """The `receives` (or `sends`) of a rank, grouped by channel, in order."""
    machine = pipeline.machines[rank]
    out: dict[Channel, list[Transfer]] = defaultdict(list)
    for transfer in machine.receives() if ahead_of else machine.sends():
        ends = (
            (transfer.sender.stage, transfer.sender.replica),
            (transfer.receiver.stage, transfer.receiver.replica),
        )
        assert ends[ahead_of] == rank and ends[0] != ends[1]
        out[transfer.boundary, transfer.what, *ends].append(transfer)
    return out


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 24),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_receives_are_in_the_order_of_sends(
    widths: list[int], num_microbatches: int, parts: int, random: Random
) -> None:
    """On each channel both ranks predict the transfers that are then sent, in the same order (NCCL
    matches by order alone)."""
    if parts > 1:
        widths = [widths[0]] * len(widths)
        num_microbatches *= len(widths) * widths[0]
    pipeline = Pipeline(
        widths, min(num_microbatches, 60) if parts == 1 else num_microbatches, parts
    )
    random_run(pipeline, random)
    sends: dict[Channel, list[Transfer]] = {}
    receives: dict[Channel, list[Transfer]] = {}
    for rank in pipeline.machines:
        sends |= transfers_by_channel(pipeline, rank, False)
        receives |= transfers_by_channel(pipeline, rank, True)
    assert sends == receives
    between_ranks = {c: sent for c, sent in pipeline.sent.items() if c[2] != c[3]}
    assert between_ranks == sends


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 24), st.integers(1, 3), st.integers(1, 3)
)
def test_with_equal_widths_each_replica_runs_in_the_usual_order(
    width: int, stages: int, count: int, parts: int, turns: int
) -> None:
    """Micro-batch i of a replica is i width + r of the step."""
    count = turns * stages if parts > 1 else count
    for stage in range(stages):
        alone = PipelineShape(stage, 0, (1,) * stages, parts, count).order()
        for replica in range(width):
            own = PipelineShape(stage, replica, (width,) * stages, parts, count * width)
            assert own.order() == [
                RunBlocks(run.what, run.micro * width + replica, run.last, run.part)
                for run in alone
            ]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9))
def test_the_condition_against_deadlock_holds(widths: list[int]) -> None:
    """For every two adjacent stages, with no more forwards than keep the next stage busy."""
    shapes = [PipelineShape(s, 0, tuple(widths), 1, 10**7) for s in range(len(widths))]
    warm = [shape.first_forwards for shape in shapes]
    assert warm[-1] == 0
    for (w, d), (w_next, d_next) in itertools.pairwise(zip(warm, widths, strict=True)):
        assert (w + 1) * d > w_next * d_next
        assert w * d >= (w_next + 1) * d_next > (w - 1) * d


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 6))
def test_every_stage_is_busy(widths: list[int], turns: int) -> None:
    """If a replica's time per micro-batch is proportional to the width of its stage, each stage
    finishes a micro-batch per second. Once the pipeline is full no stage idles: the step takes its
    micro-batches plus the time to fill and drain."""
    num_microbatches = turns * 12 * len(widths)
    pipeline = Pipeline(widths, num_microbatches)
    seconds = [{FORWARD: Fraction(d), BACKWARD: Fraction(2 * d)} for d in widths]
    for rank, machine in pipeline.machines.items():
        pipeline.begin(rank, machine.start(), seconds[rank[0]])
    while pipeline.ends:
        pipeline.now, _, what, rank, about = heapq.heappop(pipeline.ends)
        if what == "ran":
            assert isinstance(about, RunBlocks)
            runs = pipeline.end(rank, about, Fraction())
        else:
            assert isinstance(about, tuple)
            run, to = about
            runs = pipeline.machines[rank].arrived(run.what, run.micro, to.part)
        pipeline.begin(rank, runs, seconds[rank[0]])
    fill_and_drain = 3 * (2 * sum(widths) - max(widths))
    assert 3 * num_microbatches <= pipeline.now <= 3 * num_microbatches + fill_and_drain


def test_a_rank_knows_its_peers() -> None:
    """Two replicas before three: micro-batch 4 goes from the first to the second."""
    machine = StageStateMachine(PipelineShape(0, 0, (2, 3), 1, 6))
    assert machine.consumer(RunBlocks(FORWARD, 4)) == Peer(1, 0, 1)
    assert machine.producer(RunBlocks(FORWARD, 4)) is None
    assert machine.producer(RunBlocks(BACKWARD, 4)) == Peer(1, 0, 1)
    assert machine.consumer(RunBlocks(BACKWARD, 4)) is None
    assert machine.receives() == [
        Transfer(BACKWARD, i, 0, Peer(1, 0, i % 3), Peer(0, 0, 0)) for i in (0, 2, 4)
    ]


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved_stages_begin_with_the_forwards_of_the_paper(stages: int, parts: int) -> None:
    """Narayanan et al., section 2.2: min(2 (p - 1 - s) + (v - 1) p, all forwards)."""
    for stage in range(stages):
        warm = 2 * (stages - 1 - stage) + (parts - 1) * stages
        for turns in (1, 2, 8):
            shape = PipelineShape(stage, 0, (1,) * stages, parts, turns * stages)
            assert shape.first_forwards == min(warm, turns * stages * parts)


def test_a_stage_has_a_buffer_more_than_it_holds_activations() -> None:
    shapes = [PipelineShape(stage, 0, (1,) * 4, 1, 8) for stage in range(4)]
    assert [(shape.ahead, shape.slots) for shape in shapes] == [(4, 5), (3, 4), (2, 3), (1, 2)]
    assert PipelineShape(0, 0, (1,) * 4, 1, 2).slots == 2, "no more than micro-batches"


def test_a_stage_is_finished_once_its_last_run_has_ended() -> None:
    machine = StageStateMachine(PipelineShape(0, 0, (1,), 1, 1))
    [forward] = machine.start()
    [backward] = machine.ended(forward)
    assert not machine.finished
    assert machine.ended(backward) == [] and machine.finished


def test_activations_inside_a_rank_are_not_transferred() -> None:
    machine = StageStateMachine(PipelineShape(0, 0, (1,), 3, 4))
    assert machine.sends() == machine.receives() == []
    assert machine.consumer(RunBlocks(FORWARD, 1, part=0)) == Peer(0, 1, 0)


def test_interleaved_micro_batches_must_divide_evenly() -> None:
    with pytest.raises(
        ConfigError, match=r"6 micro-batches cannot be divided over 2 stages of 2 parts"
    ):
        PipelineShape(0, 0, (2, 2), 2, 6).order()
