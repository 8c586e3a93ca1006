"""A rank's part of a step and of an evaluation, with parts and links that only note what passes;
and what all ranks of a job must have alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from roadtrain import Files, Memory, Parallelism, ParallelOptions
from roadtrain.errors import LoopError
from roadtrain.stages.parallel_training import ParallelTraining
from roadtrain.stages.pipeline import Pipeline
from roadtrain.stages.protocol.pipeline import PipelineShape
from roadtrain.stages.stage_model import MicroBatch


class PassesOn:
    """A part whose block returns what it got, the buffer itself."""

    is_last = False

    def __init__(self) -> None:
        self.buffer = torch.zeros(2)

    def buffers(self, what: str, micro: int) -> list[torch.Tensor]:
        return [self.buffer]

    def run_forward(self, micro: int, batch: MicroBatch) -> list[torch.Tensor]:
        return [self.buffer]

    def drop(self) -> None: ...


class NotedLinks:
    """Messages arrive at once; those that are sent may be on their way for long."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def post(self, transfer, buffers) -> None:
        for buffer in buffers:
            buffer.fill_(transfer.micro + 1)

    def wait(self, transfer) -> None: ...

    def send(self, transfer, tensors) -> None:
        self.sent += tensors

    def flush(self) -> None: ...


def test_an_evaluation_does_not_write_to_what_is_being_sent() -> None:  # Rule 6
    links = NotedLinks()
    pipeline = Pipeline(PipelineShape(1, 0, (1, 1, 1), 1, 3), [PassesOn()], links)
    pipeline.evaluate(lambda micro: MicroBatch())
    assert [x.tolist() for x in links.sent] == [[1, 1], [2, 2], [3, 3]]


class OneRank:
    """What a ParallelTraining asks of what it is made of."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.segments = model, ()
        self.steps_done = 0

    def attach(self) -> None: ...

    def evaluate(self, batch) -> float:
        assert not any(module.training for module in self.model.modules())
        raise OSError("the data is not there")


def test_after_an_error_nothing_follows_and_modes_are_as_before() -> None:  # Rule 6
    """What was sent before the error would be taken for the next step's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    one = OneRank(model)
    training = ParallelTraining(None, one, one, one)
    with pytest.raises(OSError, match="not there"):
        training.evaluate(lambda micro: MicroBatch())
    assert [module.training for module in model.modules()] == [True, True, False]
    for again in (training.step, training.evaluate):
        with pytest.raises(LoopError, match="the evaluation after step 0 failed on this process"):
            again(lambda micro: MicroBatch())


def test_what_ranks_must_have_alike(tmp_path) -> None:  # Rule 6
    """Stages of other sizes would leave blocks out, or run them twice."""
    options = ParallelOptions(Parallelism(pp=2, stages=(2, 4)), 4, stores={0: Memory()})
    others = [
        replace(options, parallelism=Parallelism(pp=2, stages=(3, 3))),
        replace(options, stores={0: Files("here")}),
        replace(options, seed=1),
        replace(options, job="the text is abc"),
        ParallelOptions(Parallelism(pp=2), 4),
        ParallelOptions(Parallelism(pp=2), 4, resize_stages=0.1),
        ParallelOptions(Parallelism(pp=2), 4, stages="measured"),
    ]
    told = [one.describe() for one in (options, *others)]
    assert len({*told}) == len(told)
    assert replace(options, weights=str(tmp_path), deadline_s=5.0).describe() == told[0]
