"""A pipeline whose ranks are threads gives the losses and gradients of a single process. Messages
arrive as late as possible: a buffer holds NaN from the moment its receive is posted until it is
awaited."""

from __future__ import annotations

import copy
import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch
from torch import nn

from roadtrain.errors import LostError
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.pipeline import Pipeline
from roadtrain.stages.protocol.pipeline import PipelineShape, StageStateMachine, Transfer
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import StagePart

WAIT_S = 20.0


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(micro: int) -> MicroBatch:
    draw = torch.Generator().manual_seed(micro)
    return MicroBatch((torch.randn(3, 4, generator=draw),), target=torch.full((3, 2), 0.5 + micro))


def loss_of(result: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return (result - batch.target).square().mean()


class LateLinks:
    """Links that deliver messages only when awaited. sent: Shared by all ranks, a queue for each
    pair of sender and receiver. breaks: Number of the wait at which the connection is lost, or 0
    for none."""

    def __init__(self, sent: dict, breaks: int = 0) -> None:
        self.sent, self.breaks = sent, breaks
        self.buffers: dict[Transfer, list[torch.Tensor]] = {}
        self.awaited = self.flushes = 0
        self.step, self.wait_s = -1, 7.0

    def send(self, transfer: Transfer, tensors) -> None:
        channel = transfer.what, transfer.sender, transfer.receiver
        self.sent[channel].put((transfer, [x.clone() for x in tensors]))

    def post(self, transfer: Transfer, buffers) -> None:
        for buffer in buffers:
            buffer.detach().fill_(torch.nan)
        self.buffers[transfer] = buffers

    def wait(self, transfer: Transfer) -> None:
        self.awaited += 1
        if self.awaited == self.breaks:
            raise LostError("the connection is lost")
        channel = transfer.what, transfer.sender, transfer.receiver
        arrived, tensors = self.sent[channel].get(timeout=WAIT_S)
        assert arrived == transfer
        for buffer, x in zip(self.buffers.pop(transfer), tensors, strict=True):
            buffer.detach().copy_(x)
        self.wait_s += 1.0

    def flush(self) -> None:
        assert not self.buffers, "a posted receive was never awaited"
        self.flushes += 1


def ranks_of(widths, layers, micros, breaks=0) -> tuple[nn.Module, list[Pipeline], list]:
    """Return the plain model, the pipelines of all ranks, and the model copy of each rank."""
    plain = Chain(sum(layers))
    stages, stops = len(widths), [0, *accumulate(layers)]
    cuts = Cuts(plain, batch(0).args, {})
    sent: dict = defaultdict(queue.SimpleQueue)
    pipelines, models = [], []
    for stage, width in enumerate(widths):
        for replica in range(width):
            numbers = range(stage, len(layers), stages)
            segments = [Segment(stops[n], stops[n + 1]) for n in numbers]
            model = StageModel(copy.deepcopy(plain), cuts, segments)
            model.attach()
            models.append(model.whole)
            shape = PipelineShape(stage, replica, widths, len(segments), micros)
            parts = [StagePart(model, s, loss_of, None, shape.slots) for s in segments]
            pipelines.append(Pipeline(shape, parts, LateLinks(sent, breaks if stage else 0)))
    return plain, pipelines, models


def on_all(pipelines: list[Pipeline], function) -> list[float]:
    with ThreadPoolExecutor(len(pipelines)) as pool:
        return list(pool.map(function, pipelines))


def gradients(models: list[dict[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    """The sum of the ranks' gradients of each parameter."""
    out: dict[str, torch.Tensor] = {}
    for model in models:
        for name, p in model.items():
            if p.grad is not None:
                out[name] = out.get(name, 0) + p.grad
    return out


@pytest.mark.parametrize(
    ("widths", "layers", "micros"),
    [
        pytest.param((1, 1), (1, 2), 5, id="two stages"),
        pytest.param((2, 1, 1), (1, 1, 1), 4, id="narrowing"),
        pytest.param((1, 2), (2, 1), 5, id="widening"),
        pytest.param((1, 1), (1, 1, 1, 1), 4, id="interleaved"),
        pytest.param((1,), (1, 2), 3, id="two parts on one rank"),
    ],
)
@pytest.mark.slow
def test_a_pipeline_gives_the_losses_and_gradients_of_a_single_process(
    widths, layers, micros
) -> None:  # Rule 1
    plain, pipelines, models = ranks_of(widths, layers, micros)
    losses = [loss_of(plain(*batch(i).args), batch(i)) / micros for i in range(micros)]
    total = sum(losses)
    total.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    evaluated = on_all(pipelines, lambda pipeline: pipeline.evaluate(batch))
    assert sum(evaluated) == pytest.approx(total.item())
    assert not gradients(models)
    for repeated in (1, 2):
        found = on_all(pipelines, lambda pipeline: pipeline.step(6, batch))
        assert sum(found) == pytest.approx(total.item())
        assert not any(found[: -widths[-1]])
        for name, gradient in gradients(models).items():
            torch.testing.assert_close(gradient, repeated * expected[name])
        assert gradients(models).keys() == expected.keys()
        for pipeline in pipelines:
            times, links = pipeline.times, pipeline.links
            assert 0 < times.forward < WAIT_S and 0 < times.backward < WAIT_S
            assert (links.step, links.flushes) == (6, 1 + repeated)
            assert times.waiting == len(StageStateMachine(pipeline.shape).receives())


def test_a_step_that_fails_frees_its_buffers_and_the_next_may_run() -> None:  # Rule 6
    _, (_, last), _ = ranks_of((1, 1), (1, 1), 4, breaks=1)
    with pytest.raises(LostError):
        last.step(0, batch)
    (part,) = last.parts
    assert part.has_room and not any(part.holds(micro) for micro in range(4))
