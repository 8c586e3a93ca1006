"""A rank's part of a step and of an evaluation, with fake parts and links that record messages; and
the options that must be equal on all ranks of a job."""

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
    """A part whose block returns its input buffer unchanged."""

    is_last = False

    def __init__(self) -> None:
        self.buffer = torch.zeros(2)

    def buffers(self, what: str, micro: int) -> list[torch.Tensor]:
        return [self.buffer]

    def run_forward(self, micro: int, batch: MicroBatch) -> list[torch.Tensor]:
        return [self.buffer]

    def drop(self) -> None: ...


class NotedLinks:
    """Links whose messages arrive at once, while sends may stay in transit for long."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def post(self, transfer, buffers) -> None:
        for buffer in buffers:
            buffer.fill_(transfer.micro + 1)

    def wait(self, transfer) -> None: ...

    def send(self, transfer, tensors) -> None:
        self.sent += tensors

    def flush(self) -> None: ...


def test_an_evaluation_does_not_overwrite_a_buffer_being_sent() -> None:  # Rule 6
    links = NotedLinks()
    pipeline = Pipeline(PipelineShape(1, 0, (1, 1, 1), 1, 3), [PassesOn()], links)
    pipeline.evaluate(lambda micro: MicroBatch())
    assert [x.tolist() for x in links.sent] == [[1, 1], [2, 2], [3, 3]]


class OneRank:
    """Stands for the stage model, the optimizer and the pipeline of a ParallelTraining."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.segments = model, ()
        self.steps_done = 0

    def attach(self) -> None: ...

    def evaluate(self, batch) -> float:
        assert not any(module.training for module in self.model.modules())
        raise OSError("the data is not there")


def test_after_an_error_no_step_follows_and_modes_are_restored() -> None:  # Rule 6
    """Messages sent before the error would be taken for those of the next step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    rank = OneRank(model)
    training = ParallelTraining(None, rank, rank, rank)
    with pytest.raises(OSError, match="not there"):
        training.evaluate(lambda micro: MicroBatch())
    assert [module.training for module in model.modules()] == [True, True, False]
    for again in (training.step, training.evaluate):
        with pytest.raises(LoopError, match="the evaluation after step 0 failed on this process"):
            again(lambda micro: MicroBatch())


def test_options_that_must_be_equal_on_all_ranks(tmp_path) -> None:  # Rule 6
    """Different stage sizes would leave blocks out or run them twice."""
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
    described = [each.describe() for each in (options, *others)]
    assert len({*described}) == len(described)
    assert replace(options, weights=str(tmp_path), deadline_s=5.0).describe() == described[0]
