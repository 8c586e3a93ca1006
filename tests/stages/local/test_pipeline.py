"""A pipeline over processes has the losses of one process, for equal and unequal widths, uneven and
interleaved stages and several kinds of models."""

from functools import partial
from itertools import accumulate

import pytest
import torch
import transformers
from torch import distributed

from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.links import StageLinks
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.pipeline import Pipeline
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, PipelineShape
from roadtrain.stages.rank_groups import Groups
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import StagePart
from tests.support.world import run

STEPS = 3
SHAPES = {
    "llama": {
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 100,
    },
    "gpt2": {
        "n_layer": 6,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 100,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
    },
    # its blocks take and return a second tensor
    "bloom": {
        "n_layer": 6,
        "hidden_size": 32,
        "n_head": 4,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    },
}


def model_of(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPES[kind])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokens(step, micro):
    return torch.randint(
        0, 100, (2, 16), generator=torch.Generator().manual_seed(100 * step + micro)
    )


def alone(kind, num_microbatches):
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(num_microbatches):
            x = tokens(step, micro)
            loss = model(input_ids=x, labels=x).loss / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def channels_of(rank, first, widths, parts):
    channels = {}
    pairs = [(s, (s + 1) % len(widths)) for s in range(len(widths) - (parts == 1))]
    for stage, after in pairs:
        ranks = {*range(first[stage], first[stage + 1]), *range(first[after], first[after + 1])}
        for what in (FORWARD, BACKWARD):
            group = distributed.new_group(sorted(ranks))
            if rank in ranks:
                channels[stage, what] = group
    return channels


def staged(kind, widths, parts, layers, num_microbatches, wire, rank):
    distributed.init_process_group("gloo")
    stages, first = len(widths), [0, *accumulate(widths)]
    stage = next(s for s in range(stages) if rank < first[s + 1])
    replica = rank - first[stage]
    channels = channels_of(rank, first, widths, parts)
    data = [distributed.new_group(list(range(first[s], first[s + 1]))) for s in range(stages)]
    model = model_of(kind)
    x = tokens(0, 0)
    cuts = Cuts(model, (), {"input_ids": x, "labels": x})
    stops = [0, *accumulate(layers)]
    numbers = [k * stages + stage for k in range(parts)]
    segments = [Segment(stops[n], stops[n + 1]) for n in numbers]
    stage_model = StageModel(model, cuts, segments)
    stage_model.attach()
    shape = PipelineShape(stage, replica, tuple(widths), parts, num_microbatches)
    own = [
        StagePart(stage_model, segment, lambda out, _: out.loss, wire, shape.slots)
        for segment in segments
    ]
    parallelism = Parallelism(pp=stages, widths=widths, virtual_stages=parts)
    groups = Groups.of(parallelism, [("host", "", sum(widths))])
    links = StageLinks(channels, groups, rank, 60.0, torch.device("cpu"))
    links.connect()
    pipeline = Pipeline(shape, own, links)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):

        def batch(micro, step=step):
            x = tokens(step, micro)
            return MicroBatch((), {"input_ids": x, "labels": x})

        total = torch.tensor(pipeline.step(step, batch))
        for p in model.parameters():
            distributed.all_reduce(p.grad, group=data[stage])
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(total)
        losses.append(total.item())
    return losses


REST = pytest.mark.exhaustive  # test_parallelize.py trains similar cases in whole steps
CASES = [
    # kind, widths, parts, layers of each, micro-batches
    pytest.param("llama", (1, 1), 1, (3, 3), 4, id="even stages", marks=REST),
    pytest.param("llama", (2, 2), 1, (2, 4), 4, id="uneven stages of two", marks=REST),
    pytest.param("llama", (2, 1), 1, (2, 4), 5, id="narrowing", marks=REST),
    pytest.param("gpt2", (1, 3), 1, (2, 4), 7, id="widening"),
    pytest.param("bloom", (1, 2, 1), 1, (2, 2, 2), 6, id="wide in the middle", marks=REST),
    pytest.param("llama", (1, 1), 2, (1, 2, 1, 2), 4, id="interleaved", marks=REST),
    pytest.param("llama", (2, 2), 3, (1,) * 6, 8, id="interleaved stages of two", marks=REST),
    pytest.param("gpt2", (1,), 2, (2, 4), 4, id="two parts on one rank"),
    pytest.param("llama", (1, 1, 1, 1), 1, (1, 2, 2, 1), 2, id="four stages", marks=REST),
]


@pytest.mark.parametrize(("kind", "widths", "parts", "layers", "num_microbatches"), CASES)
def test_losses_are_those_of_one_process(kind, widths, parts, layers, num_microbatches):
    losses_of_ranks = run(
        sum(widths), partial(staged, kind, widths, parts, layers, num_microbatches, None)
    )
    expected = alone(kind, num_microbatches)
    assert [pytest.approx(expected, rel=1e-6)] * sum(widths) == losses_of_ranks


def test_activations_in_16_bits_change_losses_slightly():  # Rule 2: an explicit option
    losses_of_ranks = run(2, partial(staged, "llama", (1, 1), 1, (3, 3), 4, torch.bfloat16))
    expected = alone("llama", 4)
    assert losses_of_ranks[0] == pytest.approx(expected, rel=1e-3)
    assert losses_of_ranks[0] != pytest.approx(expected, rel=1e-7)
