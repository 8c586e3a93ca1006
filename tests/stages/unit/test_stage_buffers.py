"""Buffers of a model in stages equal those of the snapshot, whatever its stages were."""

import copy

import pytest
import torch
from torch import nn

from roadtrain.errors import ForeignError
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.stage_buffers import (
    adopt_buffers,
    buffers_blob,
    gather_buffers,
    own_buffers,
    restore_buffers,
)
from roadtrain.stages.stage_model import MicroBatch, StageModel

X = torch.arange(12.0).view(4, 3)


class Model(nn.Module):
    """Counts its forwards; modules before, in and after the blocks have running means."""

    def __init__(self, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.BatchNorm1d(width, affine=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)
        )
        self.behind = nn.BatchNorm1d(width, affine=False)
        self.head = nn.Linear(width, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.steps += 1
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.behind(x))


def stages_of(model, *segments, cuts=None):
    """Stages of copies of `model`."""
    cuts = cuts or Cuts(model, (X,), {})
    stages = [StageModel(copy.deepcopy(model), cuts, [segment]) for segment in segments]
    for stage in stages:
        stage.attach()
    return stages


def forward(stages):
    received = ()
    for stage in stages:
        _, value = stage.run(stage.segments[0], received, MicroBatch((X,)))
        received = (value.detach(),)


def blobs_of(stages):
    out = {"job": b"another"}
    for number, stage in enumerate(stages):
        out |= buffers_blob(stage, number)
    return out


def persistent(model):
    return {k: v for k, v in model.state_dict().items() if k in dict(model.named_buffers())}


def same(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_the_recorded_forward_changes_no_buffer():  # Rule 6
    model = Model()
    Cuts(model, (X,), {})
    same(persistent(model), persistent(Model()))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 1, 1)])
@pytest.mark.slow
def test_each_buffer_is_saved_by_the_stage_that_changes_it(sizes):  # Rule 3
    whole, begin, segments = Model(), 0, []
    for size in sizes:
        segments.append(Segment(begin, begin + size))
        begin += size
    stages = stages_of(whole, *segments)
    for _ in range(2):
        forward(stages)
        whole(X)
    (again,) = stages_of(Model(), Segment(0, 3))
    restore_buffers(blobs_of(stages), again)
    same(persistent(again.model), persistent(whole))
    names = [name for stage in stages for name in own_buffers(stage)]
    assert sorted(names) == sorted(persistent(whole))
    later = stages_of(Model(), Segment(0, 2), Segment(2, 3))
    for stage in later:
        restore_buffers(blobs_of(stages), stage)
    forward(later)
    whole(X)
    restore_buffers(blobs_of(later), again)
    same(persistent(again.model), persistent(whole))


class Together:
    """Stands for ControlLinks with one rank per stage."""

    def __init__(self, stages):
        self.stages = stages

    def gather(self, mine, what):
        return [bytes(next(iter(buffers_blob(s, 0).values()), b"")) for s in self.stages]


def test_blocks_that_move_keep_their_buffers():
    whole = Model()
    stages = stages_of(whole, Segment(0, 1), Segment(1, 3))
    forward(stages)
    whole(X)
    gathered = gather_buffers(stages[0], Together(stages))
    moved = []
    for old, segment in zip(stages, (Segment(0, 2), Segment(2, 3)), strict=True):
        had = own_buffers(old)
        old.restore()
        new = StageModel(old.model, old.cuts, [segment])
        new.attach()
        adopt_buffers(gathered, had, new)
        moved.append(new)
    forward(moved)
    whole(X)
    (again,) = stages_of(Model(), Segment(0, 3))
    restore_buffers(blobs_of(moved), again)
    same(persistent(again.model), persistent(whole))


def test_none_is_nothing_and_another_shape_is_refused():
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    (stage,) = stages_of(plain, Segment(0, 2), cuts=Cuts(plain, (X,), {}, ["0", "1"]))
    assert buffers_blob(stage, 0) == {}
    (three,) = stages_of(Model(), Segment(0, 3))
    wide = Model(4)
    four = StageModel(wide, Cuts(wide, (torch.zeros(2, 4),), {}), [Segment(0, 3)])
    with pytest.raises(ForeignError, match=r"has the shape \(3,\) in the snapshot, but \(4,\) in"):
        restore_buffers(buffers_blob(three, 0), four)
