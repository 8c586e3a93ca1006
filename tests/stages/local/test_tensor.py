"""Tensor parallelism: models split over 2 and 4 processes compute and train like the whole model."""

from __future__ import annotations

import copy
import re
from functools import cache, partial

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils import _pytree as pytree

from roadtrain.errors import DifferError, UserError
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.networks import HostCards, choose_networks
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.pieces import VALUE, Extent, Piece
from roadtrain.stages.process_groups import make_process_groups
from roadtrain.stages.rank_groups import GroupKind, Groups
from roadtrain.stages.sharded_optimizer import ShardedOptimizer, ShardedOptions
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.tensor import tensor_parallel
from roadtrain.stages.tensor_pieces import TensorPieces
from roadtrain.stages.tensor_styles import Column, LocalHeads, Row, Vocabulary
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

WORLD = 4
STEPS = 3
# the largest difference over the largest value: fp32 rounding of sums in another order
CLOSE = 2e-6


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks(WORLD)
    yield processes
    processes.close()


@cache
def tensor_mesh(degree):
    """Return this rank's tensor group, which has consecutive ranks."""
    return init_device_mesh("cpu", (WORLD // degree, degree), mesh_dim_names=("data", "tensor"))[
        "tensor"
    ]


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 61,  # does not divide
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OPT = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,  # does not divide by 4
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 1,
}
CASES = {
    "llama": ("llama", LLAMA),
    "llama, grouped heads": ("llama", LLAMA | {"num_key_value_heads": 4}),
    "llama, tied, biases": (
        "llama",
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2, own head": ("gpt2", GPT2 | {"tie_word_embeddings": False, "n_inner": 40}),
    "opt": ("opt", OPT),
    "opt, projected": (
        "opt",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "mistral": ("mistral", LLAMA | {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA | {"num_key_value_heads": 4, "head_dim": 8}),
}


def built(kind, config, seed=0):
    torch.manual_seed(seed)
    settings = transformers.AutoConfig.for_model(kind, **config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    for p in model.parameters():  # biases and norms too, since zeros and ones would hide errors
        p.data += 0.02 * torch.randn_like(p)
    return model.train()


def batch(vocabulary, seed=0):
    torch.manual_seed(100 + seed)
    return torch.randint(vocabulary, (3, 16))


def distance(own, expected, least=1e-12):
    """Return the largest difference over the largest value or `least`."""
    return ((own - expected).abs().max() / expected.abs().max().clamp_min(least)).item()


def optimizer_of(model):
    # without eps an element whose gradient is only rounding would move by a whole step
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def trained(rank, kind, config, degree):
    """Return the distances of losses, gradients and parameters from the whole model's, and whether the
    names are equal."""
    whole = built(kind, config)
    model = copy.deepcopy(whole)
    # the user's own optimizer knows the parameters already
    optimizers = [optimizer_of(whole), optimizer_of(model)]
    split = tensor_parallel(model, tensor_mesh(degree))
    losses, gradients = [], {}
    for step in range(STEPS):
        tokens = batch(config["vocab_size"], step)
        expected, own = (m(tokens, labels=tokens).loss for m in (whole, model))
        expected.backward()
        own.backward()
        losses.append(distance(own, expected))
        # the gradient of a key bias is only rounding
        least = 1e-3 * max(p.grad.abs().max().item() for p in whole.parameters())
        for (name, p), q in zip(whole.named_parameters(), model.parameters()):
            distance_of_grad = distance(split.whole_value(name, q.grad), p.grad, least)
            gradients[name] = max(gradients.get(name, 0.0), distance_of_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = {
        name: distance(split.whole_value(name, q), p)
        for (name, p), q in zip(whole.named_parameters(), model.parameters())
    }
    same_names = [n for n, _ in model.named_parameters()] == [
        n for n, _ in whole.named_parameters()
    ]
    numel = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in whole.parameters())
    return losses, gradients, parameters, same_names, numel


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", CASES)
def test_a_split_model_trains_as_the_whole_model(ranks, case, degree):
    for losses, gradients, parameters, same, numel in ranks.run(trained, *CASES[case], degree):
        assert same, "names differ from the whole model's"
        assert max(losses) < CLOSE
        assert max(gradients.values()) < 10 * CLOSE, max(gradients, key=gradients.get)
        assert max(parameters.values()) < 10 * CLOSE, max(parameters, key=parameters.get)
        assert numel < 1.5 / degree, "most of the model is not split"


def starts(rank):
    """Split models that differ by rank, with different random states."""
    torch.manual_seed(rank)
    model = built(*CASES["gpt2"], seed=rank)
    split = tensor_parallel(model, tensor_mesh(2))
    expected = built(*CASES["gpt2"], seed=rank // 2 * 2)
    own = {name: split.whole_value(name, p) for name, p in model.named_parameters()}
    torch.manual_seed(7)
    split.check_random_state()
    torch.manual_seed(rank)
    try:
        split.check_random_state()
    except DifferError as error:
        return all(torch.equal(own[n], p) for n, p in expected.named_parameters()), str(error)


def test_a_group_starts_with_the_values_of_its_first_rank(ranks):
    for equal, words in ranks.run(starts):
        assert equal
        assert "tensor ranks 0 and 1 of a replica draw different random numbers" in words


DROPS = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.5}


def dropped(rank):
    """Return loss, gradients and random numbers inside attention, without and with activation
    checkpointing, then two losses in eval mode."""
    model = built("gpt2", GPT2 | DROPS)
    split = tensor_parallel(model, tensor_mesh(2))
    seen = []
    attention = model.transformer.h[0].attn
    attention.c_proj.register_forward_pre_hook(lambda _, _inputs: seen.append(torch.rand(3)))
    out = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(11)
        tokens = batch(61)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        split.check_random_state()
        gradients = [split.whole_value(n, p.grad) for n, p in model.named_parameters()]
        out.append([loss.detach(), *gradients, seen.pop()])
        model.zero_grad()
    model.eval()
    quiet = [model(tokens, labels=tokens).loss.item() for _ in range(2)]
    return out, quiet


def test_dropout_is_equal_outside_split_layers_and_differs_inside(ranks):
    results = ranks.run(dropped)
    for first, second in (results[:2], results[2:]):
        for own_results, other in zip(first[0], second[0]):
            *alike, own = zip(own_results, other)
            assert all(torch.equal(x, y) for x, y in alike), "activations or gradients differ"
            assert not torch.equal(*own), "heads of different ranks drop the same scores"
    for (plain, recomputed), quiet in results:
        assert torch.equal(plain[-1], recomputed[-1]), "recomputation drew different numbers"
        assert max(distance(x, y) for x, y in zip(recomputed, plain)) < CLOSE
        assert quiet[0] == quiet[1] != plain[0].item()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """A user's own model, which needs a plan."""

    def __init__(self, vocabulary=30, width=16, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention": LocalHeads("heads"),
    "layers.*.attention.qkv": Column(parts=3),
    "layers.*.attention.out": Row(),
    "layers.*.mlp.0": ColwiseParallel(),
    "layers.*.mlp.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def planned(rank, degree, stage):
    """Return the distances of outputs, gradients and norm, for a decoder with all blocks or without one
    of them."""
    torch.manual_seed(0)
    whole = Decoder()
    if stage:
        whole.layers[1] = nn.Identity()
    model = copy.deepcopy(whole)
    split = tensor_parallel(model, tensor_mesh(degree), ["layers.0"] if stage else None, PLAN)
    torch.manual_seed(1)
    tokens = torch.randint(30, (2, 8))
    outputs = [m(tokens) for m in (whole, model)]
    for out in outputs:
        out.square().sum().backward()
    gradients = {
        name: distance(split.whole_value(name, q.grad), p.grad)
        for (name, p), q in zip(whole.named_parameters(), model.parameters())
    }
    same_names = [n for n, _ in model.named_parameters()] == [
        n for n, _ in whole.named_parameters()
    ]
    squares = sum(q.grad.square().sum() for n, q in model.named_parameters() if split.counts(n))
    total = squares.clone()
    torch.distributed.all_reduce(total, group=split.mesh.get_group())
    expected = sum(p.grad.square().sum() for p in whole.parameters())
    return (
        distance(*outputs[::-1]),
        gradients,
        same_names,
        distance(total, expected),
        isinstance(model.head, nn.Linear),
    )


@pytest.mark.parametrize("stage", [False, True], ids=["whole", "without a block"])
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_users_own_plan(ranks, degree, stage):
    for output, gradients, same, norm, linear in ranks.run(planned, degree, stage):
        assert same and linear
        assert output < CLOSE
        assert max(gradients.values()) < 10 * CLOSE, max(gradients, key=gradients.get)
        assert norm < CLOSE, "replicated values are not counted once"


def staged(rank, kind, config):
    """Return the distances of the loss and all gradients of two stages from those of the whole
    model."""
    whole = built(kind, config)
    tokens = batch(config["vocab_size"])
    expected = whole(tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    values = {name: p.grad for name, p in whole.named_parameters()}
    inputs = MicroBatch((), {"input_ids": tokens, "labels": tokens, "use_cache": False})
    distances, summed, received = {}, {}, ()
    stages = []  # for each stage: the model, its split and the tensors that it sent on
    for segment in (Segment(0, 1), Segment(1, 2)):
        model = copy.deepcopy(whole)
        model.zero_grad()
        stage = StageModel(model, Cuts(model, (), inputs.kwargs), [segment])
        split = tensor_parallel(model, tensor_mesh(2), stage.own_names)
        assert {name for name, _ in model.named_parameters()} == stage.names
        stage.attach()
        ended, value = stage.run(segment, received, inputs)
        assert ended == (segment.begin == 1)
        if not ended:
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
            received = tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors)
            stages.append((model, split, tensors))
            continue
        value.loss.backward()
        stages.append((model, split, []))
        distances["loss"] = distance(value.loss, expected)
        model, _, tensors = stages[0]
        with_gradient = [(x, c.grad) for x, c in zip(tensors, received) if x.requires_grad]
        torch.autograd.backward(*zip(*with_gradient))
    for model, split, _ in stages:
        for name, p in model.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            summed[name] = summed.get(name, 0) + split.whole_value(name, grad)
    least = 1e-3 * max(grad.abs().max().item() for grad in values.values())
    return distances | {name: distance(summed[name], values[name], least) for name in values}


@pytest.mark.parametrize("case", ["llama, grouped heads", "gpt2", "opt, projected"])
def test_split_stages_compute_as_the_whole_model(ranks, case):
    """A stage lacks the other stage's blocks, and both stages have the tied embedding."""
    for distances in ranks.run(staged, *CASES[case]):
        assert max(distances.values()) < 10 * CLOSE, max(distances, key=distances.get)


def refusal_of(rank, make, degree, options):
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    try:
        tensor_parallel(model, tensor_mesh(degree), **options)
    except UserError as error:
        assert [type(module) for module in model.modules()] == kinds
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        return f"{type(error).__name__}: {error}"


def tied():
    model = Decoder()
    model.head.weight = model.embed.weight
    return model


REFUSED = {
    "heads": (
        partial(built, "gpt2", GPT2 | {"n_head": 2}),
        4,
        {},
        r"ConfigError: 2 attention heads \(num_attention_heads\) cannot be split over tp 4",
    ),
    "key-value heads": (
        partial(built, "llama", LLAMA | {"num_key_value_heads": 2}),
        4,
        {},
        r"ConfigError: 2 key-value heads .* over tp 4\nhint: set tp to a divisor of 2",
    ),
    "units": (
        partial(built, "opt", OPT | {"ffn_dim": 50}),
        4,
        {},
        r"50 units of the MLP \(ffn_dim\) cannot be split over tp 4",
    ),
    "inner units that follow the width": (
        partial(built, "gpt2", GPT2 | {"n_embd": 32, "n_inner": 42}),
        4,
        {},
        r"42 units of the MLP \(n_inner\) cannot be split over tp 4",
    ),
    "unknown": (
        Decoder,
        2,
        {},
        r"tp 2 cannot split .*Decoder: its layers are not known\nhint: use Llama, .*GPT-2, OPT",
    ),
    "unknown of transformers": (
        partial(built, "bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}),
        2,
        {},
        r"BloomForCausalLM: its layers are not known",
    ),
    "a pattern": (
        Decoder,
        2,
        {"plan": {"heads": Row()}},
        r"no layer is called 'heads'\nhint: .*`head`",
    ),
    "a count": (
        Decoder,
        2,
        {"plan": {"layers.*.attention": LocalHeads("kv_heads")}},
        r"layers.0.attention: a Attention has no integer attribute kv_heads",
    ),
    "a width": (
        partial(Decoder, vocabulary=30, width=6, heads=1),
        4,
        {"plan": {"layers.*.attention.qkv": Column(parts=3)}},
        r"layers.0.attention.qkv: 6 rows or columns cannot be split over tp 4",
    ),
    "a layer": (
        Decoder,
        2,
        {"plan": {"layers.*.norm": Column()}},
        r"layers.0.norm: a LayerNorm cannot be split",
    ),
    "a style": (
        Decoder,
        2,
        {"plan": {"layers.*.norm": SequenceParallel()}},
        r"SequenceParallel.* of a LayerNorm is not supported",
    ),
    "one of two": (
        tied,
        2,
        {"plan": {"embed": Vocabulary()}},
        r"embed.weight and head.weight are one parameter",
    ),
    "a block": (
        Decoder,
        2,
        {"plan": {"head": Column(gather=True)}, "blocks": ["layers.1"]},
        r"no layer of block 'layers.1' is split",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_and_unchanged(ranks, case):
    make, degree, options, message = REFUSED[case]
    for error in ranks.run(refusal_of, make, degree, options):
        assert error and re.search(message, error), error


def token_errors(rank):
    """Return the errors of the whole and the split model for tokens near the vocabulary's end: of 61
    tokens 60 is the last, and 61 falls on the padding of the last rank."""
    models, errors = [built(*CASES["gpt2"]) for _ in range(2)], []
    tensor_parallel(models[1], tensor_mesh(2))
    for model in models:
        for token in (60, 61, 62, -1):
            try:
                model(torch.tensor([[token]]))
                errors.append("")
            except IndexError as error:
                errors.append(str(error))
    return errors


def test_a_token_outside_the_vocabulary_has_the_error_of_the_whole_model(ranks):  # Rule 6
    for errors in ranks.run(token_errors):
        assert errors == 2 * ["", *3 * ["index out of range in self"]]


def split_twice(rank):
    model = Decoder()
    for _ in range(2):
        try:
            tensor_parallel(model, tensor_mesh(2), plan={"head": Column(gather=True)})
        except UserError as error:
            return str(error)
    return None


def test_a_layer_cannot_be_split_twice(ranks):
    assert all("head: the layer is split already" in words for words in ranks.run(split_twice))


class Values:
    """A source of pieces like the optimizer of one of two data-parallel ranks."""

    param_groups, steps_done = (), 0

    def __init__(self, model, data):
        self.values = {name: p.detach().flatten() for name, p in model.named_parameters()}
        self.data = data

    def extents(self):
        out = []
        for name, x in self.values.items():
            bounds = [len(x) * (self.data + i) // 2 for i in (0, 1)]
            out.append(Extent(name, *bounds))
        return out

    def piece(self, extent):
        value = self.values[extent.name][extent.start : extent.stop].clone()
        return Piece(extent, {"exp_avg": -value, VALUE: value}, {"step": 2.0})


def over_chosen_networks(rank):
    """Like `trained`, with a tensor group from the process groups of a job."""
    groups = Groups.of(Parallelism(dp=2, tp=2), [("h", "c", WORLD)])
    hosts = [HostCards("h", "h", ())] * WORLD
    processes = make_process_groups(groups.to_create, choose_networks(groups.to_create, hosts), 60)
    own = processes[groups.group_of(GroupKind.TENSOR, rank)]
    mesh = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("tp",))
    whole = built("gpt2", GPT2)
    model = copy.deepcopy(whole)
    split = tensor_parallel(model, mesh)
    tokens = batch(61)
    for either in (whole, model):
        either(tokens, labels=tokens).loss.backward()
    split.check_random_state()
    source = TensorPieces(Values(model, rank // 2), split)
    expected = dict(whole.named_parameters())
    for extent in source.extents():
        value = source.piece(extent).arrays[VALUE]
        assert torch.equal(
            value, expected[extent.name].detach().flatten()[extent.start : extent.stop]
        )
    return max(
        distance(split.whole_value(name, p.grad), expected[name].grad)
        for name, p in model.named_parameters()
    )


def test_a_model_is_split_over_a_process_group_of_a_job(ranks):
    for distance_of_rank in ranks.run(over_chosen_networks):
        assert distance_of_rank < 10 * CLOSE, distance_of_rank


MICRO_BATCHES, CLIP = 4, 0.5  # per step; largest norm


def sharded(rank, degree, pieces_before, steps):
    """Train with tensor and data parallelism and an overlapped sharded optimizer.

    The `steps` steps follow those of `pieces_before`, if there are any. Returns gradient norms,
    all pieces and whole values.
    """
    kind, config = CASES["llama, grouped heads"]
    width, mesh = WORLD // degree, tensor_mesh(degree)
    model = built(kind, config)
    user = optimizer_of(model)
    split = tensor_parallel(model, mesh)
    data = data_group(degree)
    options = ShardedOptions(bucket_bytes=8 << 10, split=split)
    optimizer = ShardedOptimizer(model, user, data, options=options)
    if pieces_before:
        optimizer.load(parts_in(pieces_before, optimizer.needed()), 2)
    norms = []
    for step in range(optimizer.steps_done, optimizer.steps_done + steps):
        own = range(rank // degree, MICRO_BATCHES, width)
        optimizer.begin_step(len(own))
        for micro in own:
            tokens = batch(config["vocab_size"], 100 * step + micro)
            (model(tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        squares = torch.tensor(optimizer.sum_squares(), dtype=torch.float64)
        torch.distributed.all_reduce(squares)
        norms.append(squares.sqrt().item())
        optimizer.step(min(1.0, CLIP / norms[-1]))
    optimizer.wait_parameters()
    pieces = [optimizer.piece(extent) for extent in optimizer.extents()]
    whole = {name: split.whole_value(name, p) for name, p in model.named_parameters()}
    optimizer.close()
    return norms, pieces, whole


@cache
def data_group(degree):
    mesh = init_device_mesh("cpu", (WORLD // degree, degree), mesh_dim_names=("data", "tensor"))
    return mesh["data"].get_group()


def parts_in(pieces_before, needed):
    """Yield the parts of the pieces that lie in `needed`."""
    for extent in needed:
        for piece in pieces_before:
            start = max(extent.start, piece.extent.start)
            stop = min(extent.stop, piece.extent.stop)
            if piece.extent.name == extent.name and start < stop:
                own = slice(start - piece.extent.start, stop - piece.extent.start)
                arrays = {key: x[own].clone() for key, x in piece.arrays.items()}
                yield Piece(Extent(extent.name, start, stop), arrays, piece.scalars)


def train_whole(steps):
    """Return norms and values of the whole model after `steps` steps of one process."""
    kind, config = CASES["llama, grouped heads"]
    model = built(kind, config)
    optimizer, norms = optimizer_of(model), []
    for step in range(steps):
        for micro in range(MICRO_BATCHES):
            tokens = batch(config["vocab_size"], 100 * step + micro)
            (model(tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def test_a_sharded_optimizer_continues_with_another_tensor_degree(ranks):
    """Two steps with tp 2 x dp 2, then two with tp 4 from their pieces, equal those of one process."""
    norms, values = train_whole(4)
    first = ranks.run(sharded, 2, [], 2)
    pieces_before = [piece for _, pieces, _ in first for piece in pieces]
    counts = {name: torch.zeros(x.numel(), dtype=torch.int64) for name, x in values.items()}
    for piece in pieces_before:
        counts[piece.extent.name][piece.extent.start : piece.extent.stop] += 1
    assert all((count == 1).all() for count in counts.values()), (
        "an element is in no piece or in several"
    )
    second = ranks.run(sharded, 4, pieces_before, 2)
    for found in (first, second):
        for found_norms, _, _ in found:
            expected = norms[:2] if found is first else norms[2:]
            assert found_norms == pytest.approx(expected, rel=1e-5), (
                "replicated values are not counted once"
            )
    for _, _, whole in second:
        assert max(distance(whole[name], values[name]) for name in values) < 10 * CLOSE
