"""stages/stage_speeds.py on three processes, with two replicas in stage 0 and one in stage 1: the
speeds that each measures, and the sizes that all choose from them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from roadtrain.stages import block_times
from roadtrain.stages.block_times import block_parameters, block_weights, measure_blocks
from roadtrain.stages.control_links import RankPlace
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.links import StageLinks
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, PipelineShape
from roadtrain.stages.protocol.stage_sizes import compare_sizes
from roadtrain.stages.rank_groups import GroupKind, Groups
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_speeds import (
    MeasuredRank,
    measure_messages,
    measured_memory,
    measured_work,
)
from tests.support import world
from tests.support.state_pieces import control_links

BLOCKS, MICROS, NBYTES = 8, 6, 1 << 20
SLOW = 2  # the rank of stage 1 takes three times as long for a block as the others
FAST_S = 1 / 256  # a power of two: sums of it are exact
HOSTS = [("a0", "a", 2), ("b0", "b", 1)]
CPU = torch.device("cpu")


class Clock:
    """A stand-in for the clock that times blocks; only their computation advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def finished_at(self, device: torch.device) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Layer(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.clock.advance(self.seconds)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.clock.advance(self.seconds / 4))
        return y


class Model(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(clock, seconds) for _ in range(BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def links_of(groups: Groups, rank: int) -> StageLinks:
    channels = {}
    for number, boundary in enumerate(groups.boundaries):
        group = dist.new_group(list(boundary.ranks))
        what = FORWARD if boundary.kind is GroupKind.ACTIVATIONS else BACKWARD
        channels[number // 2, what] = group
    return StageLinks(channels, groups, rank, 30.0, CPU)


def measure_rank(rank: int):
    dist.init_process_group("gloo")
    groups = Groups.of(Parallelism(pp=2, widths=(2, 1)), HOSTS, blocks=BLOCKS)
    places = [RankPlace("ab"[r // 2], f"{'ab'[r // 2]}0", f"rank {r}") for r in range(3)]
    control = control_links(places, 30.0)
    links = links_of(groups, rank)
    at = groups.position(rank)
    shape = PipelineShape(at.stage, at.replica, (2, 1), 1, MICROS)
    batch = MicroBatch((torch.ones(4, 8),))
    clock = Clock()
    block_times.finished_at = clock.finished_at  # messages keep the real clock
    model = Model(clock, 3 * FAST_S if rank == SLOW else FAST_S)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    cuts = Cuts(model, batch.args, {})
    stage = StageModel(model, cuts, [Segment(0, 4) if at.stage == 0 else Segment(4, 8)])
    stage.attach()
    times = measure_blocks(stage, batch, lambda result, _: result.sum(), least_s=0.2)
    messages = measure_messages(links, shape, NBYTES, CPU)
    own = msgspec.msgpack.encode(MeasuredRank(times, messages, 1e6 - rank))
    encoded = control.gather(own, "speeds")
    all_ranks = [msgspec.msgpack.decode(data, type=MeasuredRank) for data in encoded]
    work = measured_work(groups, all_ranks, MICROS, block_weights(block_parameters(cuts, sizes)[0]))
    memory = measured_memory(groups, all_ranks, work, cuts, sizes, state_bytes=4.0)
    table = compare_sizes(work, ["a", "b"], fits=memory.fits)
    small = replace(memory, rooms=(100.0, 100.0))
    assert compare_sizes(work, ["a", "b"], fits=small.fits) is None
    refused = str(small.refusal())
    links.flush()
    dist.barrier()
    dist.destroy_process_group()
    return messages, work, memory, table, refused


def test_stage_sizes_follow_the_measured_speeds() -> None:
    results = world.run(3, measure_rank)
    for rank, result in enumerate(results):
        assert not isinstance(result, str), result
        messages, work, memory, table, refused = result
        best, text = table.best, str(table)
        received = (0, BACKWARD) if rank < 2 else (0, FORWARD)
        assert set(messages) == {received} and 0 < messages[received] < 5
        assert work == results[0][1] and work.widths == (2, 1)
        assert work.weights == (1.0,) * BLOCKS
        assert memory.rooms == (1e6 - 1, 1e6 - 2) and memory.state_bytes == 4
        assert [block.parameters for block in memory.blocks] == [72] * BLOCKS
        fast, slow = work.stages
        assert (fast.forward_s, slow.forward_s) == (FAST_S, 3 * FAST_S)
        assert (fast.backward_s, slow.backward_s) == (FAST_S / 4, 3 * FAST_S / 4)
        assert work.boundaries[0].activations_s == results[2][0][0, FORWARD]
        assert work.boundaries[0].gradients_s == max(results[r][0][0, BACKWARD] for r in (0, 1))
        # stage 1 has one replica at a third of the speed: a block takes 6 times as long per step
        assert table == results[0][3] and best.proven and best.sizes in ((7, 1), (6, 2))
        assert "even" in text and "paper" in text
        assert f"exact    {best.sizes[0]} + {best.sizes[1]}" in text
        assert "no division of 8 blocks into 2 stages fits" in refused
