"""Models built on meta get their own first values, part by part."""

import pytest
import torch
from torch import nn

from roadtrain.errors import ModelError
from roadtrain.streaming.init import materialize
from roadtrain.streaming.released import release
from roadtrain.streaming.split import split
from tests.support.toy_source import Streamed

transformers = pytest.importorskip("transformers")


def take(model, seed=0, init=None, blocks=None):
    """Initialize block by block and return name -> value; asserts that no two parts exist at
    once."""
    torch.manual_seed(seed)
    s = split(model, blocks)
    values = {}
    for part in (s.root, *s.blocks):
        materialize(part, s, init)
        alive = {
            n
            for n, p in model.named_parameters()
            if not p.is_meta and p.untyped_storage().nbytes() > 8
        }
        assert alive <= {n for n, _ in part.params}
        for n, p in part.params:
            values[n] = p.detach().clone()
        release(part.params)
        assert all(p.isnan().all() for _, p in part.params if p.is_floating_point())
    return values


def llama(device):
    with torch.device(device):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=3,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                vocab_size=96,
                tie_word_embeddings=True,
                initializer_range=0.05,
            )
        )


def bert(device):
    with torch.device(device):
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                vocab_size=96,
            )
        )


def gpt2(device):
    with torch.device(device):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=96)
        )


def t5(device):
    with torch.device(device):
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96
            )
        )


@pytest.mark.parametrize("make", [llama, bert, gpt2, t5])
@pytest.mark.slow
def test_hugging_face(make):
    model = make("meta")
    before = list(model.parameters())
    values = take(model)
    assert all(a is b for a, b in zip(before, model.parameters()))
    again = take(make("meta"))
    assert values.keys() == again.keys() == dict(model.named_parameters()).keys()
    for n in values:
        assert torch.equal(values[n], again[n])
    other = take(make("meta"), seed=1)
    assert any(not torch.equal(values[n], other[n]) for n in values)
    real = make("cpu")
    for (n, a), (m, b) in zip(real.named_buffers(), model.named_buffers()):
        assert n == m and torch.equal(a, b)
    for n, p in real.state_dict().items():  # the same distribution as when built on the CPU
        if n in values:
            std = float(p.std())
            assert values[n].shape == p.shape and values[n].dtype == p.dtype
            assert float(values[n].std()) == pytest.approx(std, rel=0.3, abs=1e-7)
            assert float(values[n].mean()) == pytest.approx(
                float(p.mean()), abs=6 * std / p.numel() ** 0.5 + 1e-7
            )


def test_trains_after_meta():
    model = llama("meta")
    values = take(model)
    s = Streamed(model)
    for index, _, view in s.source.views(None):
        view.copy_(values[s.names[index]])
    plain = llama("cpu")
    plain.load_state_dict({**values, "lm_head.weight": values["model.embed_tokens.weight"]})
    ids = torch.randint(0, 96, (2, 10))
    losses = []
    for m in (plain, model):
        losses.append(m(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    for n, p in plain.named_parameters():
        assert torch.equal(p.grad, s.grad(n))
    s.finish()


def test_optimizer_keeps_its_parameters():
    model = llama("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    take(model)
    assert optimizer.param_groups[0]["params"][0] is model.model.embed_tokens.weight
    assert not model.model.embed_tokens.weight.is_meta


class Net(nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "lin": nn.Linear(32, 32),
                        "bn": nn.BatchNorm1d(32),
                        "att": nn.MultiheadAttention(32, 2),
                    }
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(32, 1)
        self.extra = extra() if extra is not None else None


def test_plain_torch():
    with torch.device("meta"):
        model = Net()
    values = take(model, blocks=["layers.*.lin", "layers.*.att"])
    assert values["layers.0.lin.weight"].abs().max() <= 32**-0.5
    assert (values["layers.1.bn.weight"] == 1).all() and (
        values["layers.1.att.out_proj.bias"] == 0
    ).all()
    assert (model.layers[0]["bn"].running_var == 1).all() and int(
        model.layers[0]["bn"].num_batches_tracked
    ) == 0


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("freq", torch.ones(3), persistent=False)


def test_left_without_a_value():
    with torch.device("meta"):
        model = Net(Custom)
    with pytest.raises(ModelError) as error:
        take(model)
    assert (
        "extra.scale, extra.steps (buffer), extra.mask (buffer), extra.freq (buffer)\nhint:"
        in str(error.value)
    )


def test_users_init():
    def init(module):
        if isinstance(module, Custom):
            module.scale.fill_(2)
            module.steps.copy_(torch.arange(3))
            module.mask.fill_(False)
            module.freq = torch.full((3,), 5.0)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = Net(Custom)

    def both(module):
        init(module)
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()

    values = take(model, init=both, blocks=["layers.*.lin"])
    assert (values["extra.scale"] == 2).all() and model.extra.steps.tolist() == [0, 1, 2]
    assert model.extra.freq.tolist() == [5, 5, 5] and not model.extra.mask.any()


def test_shared_and_loaded_parameters_are_not_touched():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])}
        )
    model["b"][0].weight = model["a"].weight
    model["b"][1].bias = nn.Parameter(torch.full((4,), 9.0))
    s = split(model)
    materialize(s.root, s)
    shared = model["a"].weight.detach().clone()
    for part in s.blocks:
        materialize(part, s)
    assert torch.equal(model["a"].weight, shared)
    assert (model["b"][1].bias == 9).all() and not model["b"][1].weight.isnan().any()


def test_real_model_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [p.clone() for p in model.parameters()]
    s = split(model)
    for part in (s.root, *s.blocks):
        materialize(part, s)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("how", [{"values": False}, {"loaded": ["a"]}])
def test_values_from_elsewhere(how):
    model = llama("meta")
    if "loaded" in how:
        how = {"loaded": [n for n, _ in model.named_parameters()]}
    s = split(model)
    for part in (s.root, *s.blocks):
        materialize(part, s, **how)
    assert all(p.is_meta for p in model.parameters())
    for (n, a), (m, b) in zip(llama("cpu").named_buffers(), model.named_buffers()):
        assert n == m and torch.equal(a, b)
