"""parallelize() gives the losses, norms and evaluation of one process with place(), for several
models, widths and stages."""

from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import pytest
import torch
import transformers
from torch import nn

import roadtrain
from roadtrain import MicroBatch, Parallelism, ParallelOptions
from roadtrain.errors import ConfigError
from roadtrain.stages.snapshots import SnapshotOptions
from roadtrain.stages.stage_buffers import own_buffers
from roadtrain.stages.tensor_styles import Column, Row
from tests.support.models import Net
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
    # tied: the first and the last stage have a copy of the embeddings
    "gpt2": {
        "n_layer": 6,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 100,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "opt": {
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    # with dropout of embeddings, attention and residuals, as by default
    "gpt2 dropout": {"n_layer": 6, "n_embd": 32, "n_head": 4, "vocab_size": 100},
}


def model_of(kind):
    config = transformers.AutoConfig.for_model(kind.split()[0], **SHAPES[kind])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def sgd(model):
    """Return an optimizer with state whose step, unlike AdamW's, depends on the gradient's scale."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def micro_batch(step, micro):
    seed = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randint(0, 100, (2, 16), generator=seed)
    return MicroBatch((), {"input_ids": x, "labels": x})


def alone(kind, num_microbatches, steps=STEPS):
    """Return (loss, norm) of each step of one process."""
    torch.manual_seed(0)
    model = model_of(kind)
    optimizer = roadtrain.place(model, sgd(model), report=lambda _: None)
    results = []
    for step in range(steps):
        total = 0.0
        for micro in range(num_microbatches):
            loss = model(**micro_batch(step, micro).kwargs).loss / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        results.append((total, optimizer.grad_norm()))
        optimizer.zero_grad()
    optimizer.close()
    return results


def stores_of(stages, directory):
    """Return a store per stage: odd stages stream from files, even stages from memory."""
    return {
        stage: roadtrain.Files(directory / f"stage{stage}") if stage % 2 else roadtrain.Memory()
        for stage in stages
    }


def staged(kind, parallelism, num_microbatches, options, rank):
    model, lines = model_of(kind), []
    training = roadtrain.parallelize(
        model,
        sgd(model),
        ParallelOptions(parallelism, num_microbatches, deadline_s=60.0, **options),
        example=micro_batch(0, 0),
        report=lines.append,
    )
    with training:
        results = [training.step(partial(micro_batch, step)) for step in range(STEPS)]
        held_out = training.evaluate(partial(micro_batch, STEPS))
    return [(result.loss, result.grad_norm) for result in results], held_out, lines


def staged_with_moves(kind, parallelism, num_microbatches, options, sizes, rank):
    """Like `staged`, with new stage sizes before each step but the first."""
    model, lines = model_of(kind), []
    training = roadtrain.parallelize(
        model,
        sgd(model),
        ParallelOptions(parallelism, num_microbatches, deadline_s=60.0, **options),
        example=micro_batch(0, 0),
        report=lines.append,
    )
    results = []
    with training:
        for step in range(STEPS):
            if step:
                training.sizes.move(sizes[step - 1])
            results.append(training.step(partial(micro_batch, step)))
    return [(result.loss, result.grad_norm) for result in results], 0.0, lines


class Part(nn.Module):
    """A block with a frozen parameter and a buffer that counts its runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs.add_(1)
        return x + self.scale * torch.tanh(self.linear(x))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def number(step, micro):
    return MicroBatch((torch.full((2, 8), 0.1 * (step + micro + 1)),))


def square(result, _):
    return result.square().mean()


def parts_moved(rank):
    """Return losses and the number of runs of each part while parts move between two stages."""
    model = Parts()
    training = roadtrain.parallelize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        ParallelOptions(Parallelism(pp=2), 4, resize_stages=0.9, deadline_s=60.0),
        example=number(0, 0),
        loss=square,
        report=lambda _: None,
    )
    losses = []
    with training:
        for step, sizes in enumerate([(3, 1), (1, 3), (2, 2)]):
            training.sizes.move(sizes)
            losses.append(training.step(partial(number, step)).loss)
    return losses, {name: int(count) for name, count in model.named_buffers()}


@pytest.mark.slow
def test_frozen_parameters_and_buffers_move_with_their_block():  # Rule 6
    results, model, expected = run(2, parts_moved), Parts(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        total = sum(square(model(*number(step, micro).args), None) / 4 for micro in range(4))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total.item())
    for rank, (losses, runs) in enumerate(results):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert runs == {f"layers.{i}.runs": 12 for i in (2 * rank, 2 * rank + 1)}


MLP = "model.layers.*.mlp"
PLAN = {f"{MLP}.gate_proj": Column(), f"{MLP}.up_proj": Column(), f"{MLP}.down_proj": Row()}
REST = pytest.mark.exhaustive  # further cases of the same rules
CASES = [
    pytest.param("llama", Parallelism(pp=2), 4, {}, id="two stages", marks=REST),
    pytest.param(
        "llama",
        Parallelism(pp=2, dp=2, stages=(2, 4)),
        4,
        {},
        id="uneven stages of two",
        marks=REST,
    ),
    pytest.param("llama", Parallelism(pp=2, widths=(2, 1)), 5, {}, id="narrowing", marks=REST),
    pytest.param("gpt2", Parallelism(pp=2, virtual_stages=3), 4, {}, id="interleaved", marks=REST),
    pytest.param("gpt2", Parallelism(pp=2, dp=2), 4, {}, id="stages of two", marks=REST),
    pytest.param("opt", Parallelism(pp=2, widths=(1, 2)), 4, {}, id="widening"),
    pytest.param(
        "llama", Parallelism(dp=2), 4, {"overlap": False}, id="replicas, no overlap", marks=REST
    ),
    pytest.param("llama", Parallelism(pp=2, tp=2), 4, {}, id="split stages, llama", marks=REST),
    pytest.param("gpt2", Parallelism(pp=2, tp=2), 4, {}, id="split stages, gpt2"),
    pytest.param("opt", Parallelism(tp=2, dp=2), 4, {}, id="split replicas", marks=REST),
    pytest.param("llama", Parallelism(tp=2, pp=2), 4, {"tensor_plan": PLAN}, id="a tensor plan"),
    pytest.param(
        "llama", Parallelism(pp=2, dp=2), 4, {"dtype": torch.bfloat16}, id="bf16", marks=REST
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parallelism", "num_microbatches", "options"), CASES)
def test_steps_equal_those_of_one_process(kind, parallelism, num_microbatches, options):
    train = partial(staged, kind, parallelism, num_microbatches, options)
    tolerance = 1e-6 if options.get("dtype") is None else 1e-2
    *steps, (held_out, _) = alone(kind, num_microbatches, STEPS + 1)
    results = run(parallelism.devices, train)
    check(results, steps, parallelism, tolerance)
    assert results[0][1] == pytest.approx(held_out, rel=tolerance), (
        "the held-out loss is not that of a step"
    )


def check(results, expected, parallelism, tolerance=1e-6):
    assert all(isinstance(result, tuple) for result in results), results
    for steps, _, _ in results:
        assert steps == results[0][0]  # all ranks return the same
        for (loss, norm), (own_loss, own_norm) in zip(steps, expected, strict=True):
            assert loss == pytest.approx(own_loss, rel=tolerance)
            assert norm == pytest.approx(own_norm, rel=10 * tolerance)
    if set(parallelism.replicas_of) == {1} and parallelism.tp == 1:
        # each gradient has one sum in the same order, so the bits are equal (Rule 1)
        assert [loss for loss, _ in results[0][0]] == [loss for loss, _ in expected]
    assert len({held_out for _, held_out, _ in results}) == 1
    assert any(line.startswith("parallel: ") for line in results[0][2])
    assert not any("draws random numbers" in line for line in results[0][2])  # without dropout
    assert not results[-1][2]  # only the first rank reports


DROPOUT = "gpt2 dropout"


@pytest.fixture(scope="module")
def undivided():
    """Losses and norms with dropout of one process that runs every micro-batch."""
    ((steps, _, _),) = run(1, partial(staged, DROPOUT, Parallelism(), 4, {}))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "placed"),
    [
        pytest.param(Parallelism(pp=2), False, marks=REST),
        (Parallelism(pp=3, virtual_stages=2), False),
        pytest.param(Parallelism(pp=2, widths=(2, 1)), False, marks=REST),
        (Parallelism(pp=2, widths=(1, 2), stages=(4, 2)), False),
        (Parallelism(dp=2), False),
        pytest.param(Parallelism(pp=2, dp=2, stages=(1, 5)), False, marks=REST),
        (Parallelism(pp=2), True),  # blocks are recomputed in backward
    ],
    ids=str,
)
def test_dropout_does_not_depend_on_stages_or_widths(parallelism, placed, undivided, tmp_path):
    """Rule 1. A block's random numbers are a function of seed, step, micro-batch and block."""
    count = 6 if parallelism.virtual_stages > 1 else 4
    if count == 6:
        ((undivided, _, _),) = run(1, partial(staged, DROPOUT, Parallelism(), count, {}))
    options = {"stores": stores_of((0, 1), tmp_path)} if placed else {}
    results = run(parallelism.devices, partial(staged, DROPOUT, parallelism, count, options))
    # with tied embeddings the first and the last stage each sum their own gradients first, so norms
    # and later losses agree to rounding, as they do without dropout
    for steps, _, _ in results:
        assert torch.tensor(steps).allclose(torch.tensor(undivided), rtol=1e-5, atol=0), steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "differs"), [(DROPOUT, True), pytest.param("gpt2", False, marks=REST)]
)
def test_tensor_ranks_report_random_numbers_of_their_own(kind, differs):  # Rule 2
    results = run(2, partial(staged, kind, Parallelism(tp=2), 2, {}))
    assert any("draws random numbers" in line for line in results[0][2]) is differs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallelism", "stages"),
    [
        # the ranks of stage 2 sum and update themselves, the other stages stream
        ("llama", Parallelism(pp=3), (0, 1)),
        pytest.param("llama", Parallelism(pp=2, virtual_stages=3), (0, 1), marks=REST),
        pytest.param("gpt2", Parallelism(pp=2), (0, 1), marks=REST),
    ],
)
def test_placed_stages_stream_their_parameters(kind, parallelism, stages, tmp_path):
    options = {"stores": stores_of(stages, tmp_path)}
    train = partial(staged, kind, parallelism, 4, options)
    check(run(parallelism.devices, train), alone(kind, 4), parallelism)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallelism", "num_microbatches", "options"),
    [
        pytest.param("gpt2", Parallelism(pp=2, dp=2), 4, {"stages": "paper"}, marks=REST),
        (
            "llama",
            Parallelism(pp=2, widths=(2, 1)),
            5,
            {"stages": "measured", "resize_stages": 0.2},
        ),
    ],
)
def test_blocks_move_between_steps(kind, parallelism, num_microbatches, options):
    train = partial(
        staged_with_moves, kind, parallelism, num_microbatches, options, [(1, 5), (4, 2)]
    )
    results = run(parallelism.devices, train)
    check(results, alone(kind, num_microbatches), parallelism)
    output = "\n".join(results[0][2])
    assert "exact" in output and "paper" in output and "even" in output
    assert "stages of 4, 2 blocks from step 3 on" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "best"}, "`stages` cannot be 'best'"),
        ({"stages": "measured", "stores": {0: roadtrain.Memory()}}, "number of stores is 1"),
        ({"stores": {2: roadtrain.Memory()}}, "stage 2, but pp is 2"),
        ({"activations": torch.float32}, "activations cannot be sent as torch.float32"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ParallelOptions(Parallelism(pp=2), 2, **options)


def test_data_parallel_ranks_need_a_store_on_servers():
    with pytest.raises(
        ConfigError, match="2 data-parallel ranks, but a Files store supports only 1"
    ):
        ParallelOptions(Parallelism(pp=2, dp=2), 4, stores={0: roadtrain.Files("somewhere")})


def test_lossy_activations_are_printed():  # Rule 2
    options = ParallelOptions(Parallelism(pp=2), 2, activations=torch.bfloat16)
    assert options.lossy_notes() == ["lossy: activations are sent as torch.bfloat16"]


def output_with_different_seeds(rank):
    """Return the output of this process."""
    torch.manual_seed(rank)
    model, x = Net(depth=2, width=32), torch.zeros(2, 8, dtype=torch.long)
    with redirect_stdout(StringIO()) as output:
        roadtrain.parallelize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ParallelOptions(Parallelism(pp=2, widths=(1, 2)), 2, deadline_s=30.0),
            example=MicroBatch((x,)),
            loss=lambda result, batch: result.mean(),
            report=lambda _: None,
        ).close()
    return output.getvalue()


@pytest.mark.slow
def test_different_parameters_within_a_stage_are_reported():  # Rule 6
    first, second, third = run(3, output_with_different_seeds)
    assert "stage 1, the group of ranks 1, 2: parameters differ at the start" in second
    assert not first and not third


def resume_and_snapshot(kind, parallelism, directory, rank):
    """Take three steps from the state committed in `directory`, then a snapshot."""
    training = roadtrain.parallelize(
        model := model_of(kind),
        sgd(model),
        ParallelOptions(parallelism, 4, deadline_s=60.0),
        example=micro_batch(0, 0),
        report=lambda _: None,
    )
    with training:
        training.keep(directory, SnapshotOptions(), None, lambda _: None)
        first = training.steps_done
        steps = range(first, first + STEPS)
        losses = [training.step(partial(micro_batch, step)).loss for step in steps]
        training.snapshot({})
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_tensor_parallel_training_resumes_with_other_degrees(kind, tmp_path):
    """Rule 3. The run uses tp 2 first, then stages, then tp and dp."""
    expected, losses_of_run = [loss for loss, _ in alone(kind, 4, 3 * STEPS)], []
    for degrees in (Parallelism(tp=2), Parallelism(pp=2), Parallelism(tp=2, dp=2)):
        losses = run(degrees.devices, partial(resume_and_snapshot, kind, degrees, tmp_path))
        assert all(rank_losses == losses[0] for rank_losses in losses)
        losses_of_run += losses[0]
    assert losses_of_run == pytest.approx(expected, rel=1e-5)


class Expert(nn.Module):
    """A block that routes rows to one of two layers and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(x)
        out = torch.zeros_like(x)
        for rows, layer in ((x[:, 0] > 0, self.first), (x[:, 0] <= 0, self.second)):
            (chosen,) = rows.nonzero(as_tuple=True)
            out = out.index_add(0, chosen, layer(x[chosen]))
        return x + torch.tanh(out)


def unusual():
    """Return a model with experts and running means inside and outside its blocks, and a frozen start."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ModuleList(Expert() for _ in range(4)), nn.BatchNorm1d(8)
    )
    model.forward = lambda x: forward(model, x)
    for p in (*model[0].parameters(), *model[1][0].parameters()):
        p.requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def forward(model, x):
    x = model[0](x)
    for block in model[1]:
        x = block(x)
    return model[2](x)


def rows(step, micro):
    return MicroBatch((torch.randn(6, 4, generator=torch.Generator().manual_seed(step + micro)),))


def squared(result, _):
    return (result[:, 0] - result[:, 1:].sum(1)).square().mean()


def unusual_stages(rank):
    model, optimizer = unusual()
    options = ParallelOptions(Parallelism(pp=2), 4, resize_stages=0.9, deadline_s=60.0)
    training = roadtrain.parallelize(
        model, optimizer, options, example=rows(0, 0), loss=squared, report=lambda _: None
    )
    losses = []
    with training:
        for step, sizes in enumerate([(1, 3), (3, 1), (2, 2)]):
            training.sizes.move(sizes)
            losses.append(training.step(partial(rows, 10 * step)).loss)
        training.sizes.move((1, 3))
        own = own_buffers(training.stage_model)
        return losses, {name: value.tolist() for name, value in own.items()}


def test_an_unusual_model_trains_in_stages_that_move():
    """Rules 1 and 3. The running statistics of a block move with it."""
    model, optimizer = unusual()
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [squared(model(*rows(10 * step, micro).args), None) / 4 for micro in range(4)]
        sum(parts).backward()
        optimizer.step()
        expected.append(sum(parts).item())
    results = run(2, unusual_stages)
    assert all(isinstance(result, tuple) for result in results), results
    buffers = results[0][1] | results[1][1]
    assert buffers.keys() == {name for name, _ in model.named_buffers()}
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.named_buffers():
        assert buffers[name] == pytest.approx(value.tolist(), rel=1e-5, abs=1e-6), name
