"""The streamed model against the plain one, bit for bit: losses, gradients, buffers, RNG."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from roadtrain.errors import BudgetError, LoopError, ModelError
from roadtrain.streaming.grads import PlacedGrad
from tests.support.toy_source import Streamed

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(5))


def gpt2(**kw):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=4, vocab_size=96, n_positions=64, **kw
    )
    return transformers.GPT2LMHeadModel(config).train()


def llama(**kw):
    torch.manual_seed(1)
    kw = {"attention_dropout": 0.1, "tie_word_embeddings": False, **kw}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            max_position_embeddings=64,
            **kw,
        )
    ).train()


def lm_loss(model, ids=IDS, **kw):
    return model(input_ids=ids, labels=ids, **kw).loss


def same(a, b, rtol=0.0):
    assert (a is None) == (b is None)
    if a is not None:
        a, b = a.detach(), b.detach()
        assert a.dtype == b.dtype and a.shape == b.shape
        assert rtol or torch.equal(a, b), f"differ by {(a - b).abs().max()} of {a.abs().max()}"
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(float(a.abs().max()), 1e-6))


def same_grads(plain, s, rtol=0.0):
    for name, p in plain.named_parameters():
        same(p.grad, s.grad(name), rtol)


def compare(make, loss_of, steps=3, micro=1, lr=0.1, rtol=0.0, **kw):
    """Run `steps` SGD steps of `micro` backwards each, plain and streamed, and compare bit for bit.

    With `rtol` where plain autograd adds the same terms in another order, which happens if a
    block's input has other readers than that block.
    """
    plain, s = make(), Streamed(make(), **kw)
    for step in range(steps):
        got = []
        for model in (plain, s.model):
            torch.manual_seed(100 + step)
            losses = []
            for i in range(micro):
                loss = loss_of(model) * (i + 1)
                loss.backward()
                losses.append(loss.detach())
            got.append((torch.stack(losses), torch.get_rng_state()))
        same(got[0][0], got[1][0], rtol)
        assert torch.equal(got[0][1], got[1][1])
        same_grads(plain, s, rtol)
        for (n, a), (m, b) in zip(plain.named_buffers(), s.model.named_buffers()):
            assert n == m
            same(a, b)
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=lr)
        plain.zero_grad()
        s.sgd(lr)
        for name, p in plain.named_parameters():
            same(p.detach(), s.value(name), rtol)
    assert s.ends == steps * micro
    s.finish()
    return s


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.slow
def test_hf(make, attention):
    compare(lambda: make(attn_implementation=attention), lm_loss)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.slow
def test_accumulation_and_padding_mask(make):
    mask = torch.ones_like(IDS)
    mask[0, 18:] = 0
    compare(make, lambda m: lm_loss(m, attention_mask=mask), micro=3)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.slow
def test_autocast(make):
    def loss(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lm_loss(model)

    compare(make, loss)


def test_backward_inside_autocast():
    plain, s = gpt2(), Streamed(gpt2())
    for _ in range(2):
        losses = []
        for model in (plain, s.model):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses.append(lm_loss(model))
                losses[-1].backward()
        same(*losses)
    same_grads(plain, s)
    s.sgd(0.5)
    with torch.no_grad():
        for p in plain.parameters():
            p.sub_(p.grad, alpha=0.5)
    plain.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        a = lm_loss(plain)
        torch.manual_seed(0)
        same(a, lm_loss(s.model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_low_precision_parameters(dtype):
    compare(lambda: llama().to(dtype), lm_loss)
    s = Streamed(gpt2(), dtype=dtype)  # fp32 model; parameters are sent and used in `dtype`
    plain = gpt2().to(dtype)
    losses = []
    for model in (plain, s.model):
        torch.manual_seed(3)
        losses.append(lm_loss(model))
        losses[-1].backward()
    same(*losses)
    same_grads(plain, s)
    s.finish()


def test_spilled_inputs(tmp_path):
    ids = IDS.repeat(2, 2)
    assert ids.numel() * 32 * 4 < 64 << 10
    ids = ids.repeat(4, 1)
    s = compare(gpt2, lambda m: lm_loss(m, ids), budget=100_000, scratch=tmp_path, steps=2)
    assert s.activations.bytes_spilled > 0
    with pytest.raises(BudgetError, match="block inputs need"):
        lm_loss(Streamed(gpt2(), budget=100_000).model, ids)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_own_checkpointing(make, reentrant):
    def checkpointed():
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    plain, s = make(), Streamed(checkpointed())
    losses = []
    for model in (plain, s.model):
        torch.manual_seed(0)
        losses.append(lm_loss(model, use_cache=False))
        losses[-1].backward()
    same(*losses)
    same_grads(plain, s)
    assert all(part.module.gradient_checkpointing for part in s.split.blocks)
    s.finish()


@pytest.mark.parametrize("reentrant", [False, True])
def test_block_inside_a_checkpoint(reentrant):
    class Checkpointed(Mlp):
        def forward(self, x):
            x = self.inn(x)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return self.out(x)

    compare(lambda: Checkpointed(nn.Dropout(0.2)), lambda m: m(X).square().mean())


class Mlp(nn.Module):
    """A stack of blocks. extra: A module inside each block."""

    def __init__(self, extra=None, n=3):
        torch.manual_seed(2)
        super().__init__()
        self.inn = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(8, 8),
                    nn.GELU(),
                    *([copy.deepcopy(extra)] if extra is not None else []),
                )
                for _ in range(n)
            ]
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        x = self.inn(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


X = torch.randn(10, 6, generator=torch.Generator().manual_seed(3))


def sq(model, x=X):
    return model(x).square().mean()


def test_batch_norm():
    compare(lambda: Mlp(nn.BatchNorm1d(8)), sq, micro=2)


def test_batch_norm_several_forwards_before_a_backward():
    def two(model):
        a, b = sq(model), sq(model, X * 2)
        return a + b

    compare(lambda: Mlp(nn.BatchNorm1d(8, momentum=None)), two)


def test_a_buffer_changed_between_forward_and_backward():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return x * self.scale

    plain, s = Mlp(Scaled()), Streamed(Mlp(Scaled()))
    sq(plain).backward()
    loss = sq(s.model)
    s.model.layers[1][2].scale.mul_(2)
    s.model.layers[2][2].scale = torch.zeros(())
    loss.backward()  # with the buffer as it was in the forward
    same_grads(plain, s)
    assert [float(layer[2].scale) for layer in s.model.layers] == [1, 2, 0]
    s.finish()


def test_batch_norm_in_eval_then_train():
    plain, s = Mlp(nn.BatchNorm1d(8)), Streamed(Mlp(nn.BatchNorm1d(8)))
    for model in (plain, s.model):
        loss = sq(model.eval())
        if model is plain:
            loss.backward()
        with torch.no_grad():
            sq(model.train())  # its kernel changes the statistics without a version count
        if model is not plain:
            loss.backward()
    same_grads(plain, s)
    assert all(m.training for m in s.model.modules())


def test_several_forwards_before_backwards():
    plain, s = Mlp(nn.Dropout(0.3)), Streamed(Mlp(nn.Dropout(0.3)))
    for model in (plain, s.model):
        torch.manual_seed(4)
        a, b, c = sq(model), sq(model, X + 1), sq(model, X - 1)
        if model is s.model:
            assert [s.stream.pending(i) for i in (1, 2, 3)] == [3, 3, 3]
        b.backward()
        (a * 2).backward()
        del c
    same_grads(plain, s)
    gc.collect()
    assert s.ends == 2
    s.finish()


def test_discarded_graph():
    s = Streamed(Mlp())
    loss = sq(s.model)
    assert s.stream.pending(1) == 1
    del loss
    assert s.stream.pending(1) == 0 and s.activations.bytes_held == 0
    compare(Mlp, sq, steps=1)
    s.finish()


def test_skipped_block_and_partly_used_block():
    class Picky(Mlp):
        def __init__(self):
            super().__init__(nn.Tanh())
            self.turn = 0

        def forward(self, x):
            x = self.inn(x)
            self.turn += 1
            for i, layer in enumerate(self.layers):
                if i != self.turn % 3:
                    x = layer(x)
            return self.out(x)

    s = compare(Picky, sq, steps=4)
    assert len(s.source.pushes) == 8


def test_unused_parameter_is_absent():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Half(), Half()])

    s = compare(Net, sq)
    assert all(len(present) == 2 for _, present in s.source.pushes)
    assert s.params[s.names.index("layers.0.unused.weight")].grad is None


def test_reused_block():
    class Albert(Mlp):
        def forward(self, x):
            x = self.inn(x)
            for _ in range(4):
                x = self.layers[0](x)
            return self.out(self.layers[1](self.layers[2](x)))

    compare(lambda: Albert(nn.Dropout(0.1)), sq)

    def albert():
        torch.manual_seed(0)
        return transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(
                hidden_size=32,
                embedding_size=16,
                num_attention_heads=4,
                intermediate_size=64,
                vocab_size=96,
                num_hidden_layers=4,
                num_hidden_groups=2,
            )
        ).train()

    assert len(compare(albert, lm_loss).split.blocks) == 2


def test_tied():
    def tied():
        model = Mlp()
        model.layers[1][0].weight = model.layers[0][0].weight
        model.layers[2][0].bias = model.inn.bias
        return model

    compare(tied, sq, micro=2)
    s = compare(lambda: llama(tie_word_embeddings=True), lm_loss)
    assert "lm_head.weight" not in s.names


def test_lora():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = (
                nn.Linear(base.in_features, 2, bias=False),
                nn.Linear(2, base.out_features, bias=False),
            )

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    def make():
        model = llama().requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
        return model

    s = compare(make, lm_loss)
    assert {len(present) for _, present in s.source.pushes} == {4}


def test_frozen_prefix_is_not_recorded():
    def make():
        model = Mlp()
        for module in (model.inn, model.layers[0]):
            module.requires_grad_(False)
        return model

    s = compare(make, sq, steps=1)
    assert [b for b, _ in s.source.pushes] == [3, 2]
    assert s.source.fetches == [1, 2, 3, 3, 2]


def test_parameters_in_no_group():
    model = Mlp()
    groups = {p: 0 for n, p in model.named_parameters() if "bias" in n}
    s = Streamed(model, groups=groups)
    plain = Mlp()
    sq(plain).backward()
    sq(s.model).backward()
    for n, p in plain.named_parameters():
        if n.startswith("layers"):
            same(p.grad if "bias" in n else None, s.grad(n))


def test_unfrozen_later():
    model = Mlp()
    model.layers[0].requires_grad_(False)
    Streamed(model)
    sq(model).backward()
    model.layers[0].requires_grad_(True)
    with pytest.raises(LoopError, match=r"'layers.0' was frozen"):
        sq(model)


def test_freezing_while_training():
    plain, s = Mlp(), Streamed(Mlp())
    for model in (plain, s.model):
        model.layers[1].requires_grad_(False)
        sq(model).backward()
    same_grads(plain, s)
    s.finish()


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder(kind):
    def make():
        torch.manual_seed(0)
        if kind == "t5":
            return transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    d_model=32,
                    d_kv=8,
                    d_ff=64,
                    num_layers=2,
                    num_heads=4,
                    vocab_size=96,
                    decoder_start_token_id=0,
                )
            ).train()
        return transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=96,
                max_position_embeddings=64,
                encoder_layerdrop=0.3,
                pad_token_id=1,
                bos_token_id=0,
                eos_token_id=2,
                decoder_start_token_id=2,
            )
        ).train()

    s = compare(make, lm_loss, steps=1, rtol=3e-5)
    assert len(s.split.blocks) == 4


class Odd(nn.Module):
    """A block with every kind of argument and result."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, state, *, options):
        x, mask = state["x"], state["mask"]
        y = self.lin(x) * mask + options[1][0]
        return {
            "y": y,
            "again": y,
            "x": x,
            "none": None,
            "n": 3,
            "name": "odd",
            "argmax": y.argmax(-1),
            "mask": mask,
            "pair": (y.sum(), [y[:, :2]]),
            "weight": self.lin.weight,
            "plain": torch.ones(3),
        }


class OddNet(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.inn = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Odd(), Odd()])

    def forward(self, x):
        state = {"x": self.inn(x), "mask": torch.ones(len(x), 1)}
        total = 0.0
        self.outs = []
        for layer in self.layers:
            out = layer(state, options=("a", (torch.tensor(0.5), None), 4))
            self.outs.append(out)
            assert (
                out["y"] is out["again"]
                and out["none"] is None
                and out["n"] == 3
                and out["name"] == "odd"
            )
            assert not any(out[k].requires_grad for k in ("argmax", "mask", "plain"))
            assert out["argmax"].dtype == torch.int64
            total = total + out["pair"][0] + out["pair"][1][0].square().sum() + out["weight"].sum()
            state = {"x": torch.tanh(out["again"]) + out["x"], "mask": out["mask"]}
        return total + state["x"].sum()


def test_odd_arguments_and_results():
    s = compare(OddNet, lambda m: m(X) / 100, lr=0.01)
    assert s.ends == 3
    s = Streamed(OddNet())
    with torch.no_grad():
        s.model(X)
    same(s.model.outs[0]["weight"], s.value("layers.0.lin.weight"))


def test_model_outputs_and_unused_outputs():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return transformers.modeling_outputs.BaseModelOutput(
                last_hidden_state=self.lin(x), hidden_states=(self.other(x), x)
            )

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            x = self.inn(x)
            for layer in self.layers:
                x = layer(x).last_hidden_state
            return self.out(x)

    s = compare(Net, sq)
    assert all(len(present) == 2 for _, present in s.source.pushes)


def test_all_hidden_states():
    def loss(model):
        out = model(input_ids=IDS, output_hidden_states=True)
        return sum(h.square().mean() for h in out.hidden_states)

    compare(gpt2, loss, steps=1, rtol=3e-5)


def test_attentions_taken_by_hooks_inside_blocks():
    plain, s = gpt2(attn_implementation="eager"), Streamed(gpt2(attn_implementation="eager"))
    outs = []
    for model in (plain, s.model):
        torch.manual_seed(0)
        outs.append(model(input_ids=IDS, labels=IDS, output_attentions=True))
        outs[-1].loss.backward()
    same(outs[0].attentions[1], outs[1].attentions[1])
    same_grads(plain, s)
    with pytest.raises(ModelError, match="did not return it"):
        s.model(input_ids=IDS, output_attentions=True).attentions[0].square().sum().backward()


def test_eval_and_generate():
    for make in (gpt2, llama):
        plain, s = make().eval(), Streamed(make().eval())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                same(plain(IDS).logits, s.model(IDS).logits)
                a = plain.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
                b = s.model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
                assert torch.equal(a, b)
        for model in (plain, s.model):  # training continues, and gradients flow in eval mode too
            lm_loss(model).backward()
        same_grads(plain, s)
        s.finish()


def test_filled_cache_is_refused():
    s = Streamed(llama().eval())
    with torch.no_grad():
        out = s.model(IDS, use_cache=True)
    # transformers 5.24 has another name for it.
    name = "cache" if "cache" in out else "past_key_values"
    assert out[name].get_seq_length() == IDS.shape[1]
    with pytest.raises(
        ModelError,
        match=r"a DynamicCache that is not empty during training\nhint: pass use_cache=False",
    ):
        s.model(IDS, **{name: out[name]})


def test_mode_and_rng_are_replayed():
    plain, s = gpt2(), Streamed(gpt2())
    torch.manual_seed(0)
    lm_loss(plain).backward()
    torch.manual_seed(0)
    loss = lm_loss(s.model)
    s.model.eval()
    torch.manual_seed(77)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert not any(m.training for m in s.model.modules())
    same_grads(plain, s)


def test_encoder_layer_fast_path():
    """torch's TransformerEncoderLayer uses another kernel when gradients are off: note SAME
    GRAPH."""

    def make():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()

    x = torch.randn(2, 5, 16)
    compare(make, lambda m: m(x).square().mean())


def test_version_check():
    s = Streamed(Mlp())
    loss = sq(s.model)
    s.source.version[2] += 1
    with pytest.raises(
        LoopError, match=r"parameters changed between forward and backward of block 'layers.1'"
    ):
        loss.backward()
    assert not any(s.source.out.values())


def test_a_shared_parameter_changed_between_forward_and_backward():
    model = Mlp()
    model.layers[2][0].bias = model.inn.bias
    s = Streamed(model)
    loss = sq(s.model)
    torch.autograd.graph.increment_version(model.inn.bias)
    with pytest.raises(LoopError, match=r"parameters changed .* 'layers.2'"):
        loss.backward()


def test_input_changed_in_place():
    class Rude(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            x += 1
            return self.lin(x)

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Rude(), Rude()])

        def forward(self, x):
            return self.layers[0](self.inn(x) * 1)

    s = Streamed(Net())
    with pytest.raises(
        (ModelError, RuntimeError), match=r"changes one of its inputs in place|leaf Variable"
    ):
        s.model(X)
    s = Streamed(Mlp())
    h = s.model.inn(X)
    out = s.model.layers[0](h)
    h.data.add_(1)  # torch does not count this change either
    h.detach().add_(1)
    with pytest.raises(
        ModelError, match=r"'layers.0': an input of the block, of shape \(10, 8\), was changed in"
    ):
        out.sum().backward()


def test_hidden_gradient_is_refused():
    class Sneaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.bias = None

        def forward(self, x):
            return self.lin(x) + self.hidden

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Sneaky(), Sneaky()])
            self.extra = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            x = self.inn(x)
            for layer in self.layers:
                layer.hidden = self.extra * 2
                x = layer(x)
            return self.out(x)

    with pytest.raises(ModelError, match=r"'layers.0' uses a tensor of shape \(8,\)"):
        sq(Streamed(Net()).model)


def test_stashed_output_is_refused():
    class Stash(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            y = self.lin(x)
            self.aux = y.square().mean()
            return y

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Stash(), Stash()])

        def forward(self, x):
            return super().forward(x).mean() + sum(layer.aux for layer in self.layers)

    s = Streamed(Net())
    with pytest.raises(ModelError, match=r"computed in block 'layers.\d' was differentiated"):
        s.model(X).backward()


def test_opaque_output_is_refused():
    class Box:
        pass

    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            box = Box()
            box.y = self.lin(x)
            return box

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Boxed(), Boxed()])

        def forward(self, x):
            return self.layers[0](self.inn(x)).y

    with pytest.raises(ModelError, match="returns a Box"):
        Streamed(Net()).model(X)


def test_backward_twice():
    plain, s = Mlp(), Streamed(Mlp())
    for model in (plain, s.model):
        loss = sq(model)
        loss.backward(retain_graph=True)
        loss.backward()
    same_grads(plain, s)
    assert s.ends == 2
    with pytest.raises((LoopError, RuntimeError), match="second time"):
        loss.backward()
    out = s.model.layers[0](torch.ones(2, 8)).sum()
    out.backward()
    with pytest.raises(LoopError, match=r"second time through block 'layers.0'"):
        out.backward()
    del out, loss
    s.finish()


def test_gradient_of_an_input_pushes_nothing():
    plain, s = Mlp(), Streamed(Mlp())
    got = []
    for model in (plain, s.model):
        x = X.clone().requires_grad_()
        got.append(torch.autograd.grad(sq(model, x), x)[0])
    same(*got)
    assert not s.source.pushes and all(p.grad is None for p in s.params)
    s.finish()


def test_double_backward_is_refused():
    s = Streamed(Mlp())
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(sq(s.model, x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_pass_end_when_only_the_root_has_gradients():
    s = Streamed(Mlp())
    s.model.out(torch.ones(1, 8)).sum().backward()
    assert s.ends == 1
    with pytest.raises(ZeroDivisionError):  # a failing pass does not hide the next
        loss = sq(s.model)
        loss.register_hook(lambda g: 1 / 0)
        loss.backward()
    s.zero_grad()
    sq(s.model).backward()
    assert s.ends == 2


def test_handles():
    plain, s = Mlp(), Streamed(Mlp())
    sq(plain).backward()
    sq(s.model).backward()
    p = s.model.layers[0][0].weight
    assert isinstance(p.grad, PlacedGrad) and p.grad.param == s.names.index("layers.0.0.weight")
    assert isinstance(s.model.inn.weight.grad, torch.Tensor) and not isinstance(
        s.model.inn.weight.grad, PlacedGrad
    )
    want = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(
        nn.utils.clip_grad_norm_(s.model.parameters(), 1e-3), want, rtol=1e-6, atol=0
    )
    with pytest.raises(LoopError, match=r"was set or scaled"):
        sq(s.model).backward()
    assert not any(s.source.out.values())


def test_an_error_inside_a_block_releases_it():
    s = Streamed(Mlp())
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        ):
            s.model.layers[0](torch.ones(2, 5))
    gc.collect()
    s.finish()


def test_detach_restores_exactly():
    model = Mlp()

    def own(x):
        return x

    model.layers[1].forward = own
    s = Streamed(model)
    assert "forward" in model.layers[0].__dict__
    s.stream.detach()
    assert "forward" not in model.layers[0].__dict__ and model.layers[1].forward is own
    assert model.layers[0].forward.__self__ is model.layers[0]


def test_recursion():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x, depth=2):
            return self.lin(x) if depth == 0 else self(self.lin(x), depth - 1)

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Twice(), Twice()])

    compare(Net, sq)


def test_copying_is_refused():
    s = Streamed(Mlp())
    with pytest.raises(LoopError, match="in memory only"):
        copy.deepcopy(s.model)
    s.finish()
    with pytest.raises(LoopError, match="in memory"):  # Rule 6: no copy full of NaN
        copy.deepcopy(s.model)


def test_only_block_inputs_are_kept():
    """Between forward and backward only the input of a block stays alive, nothing inside it."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)
            self.alive = []

        def forward(self, x):
            h = self.up(x)
            self.alive.append(weakref.ref(h))
            return self.down(torch.relu(h))

    class Net(Mlp):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Wide() for _ in range(4)])

    s = Streamed(Net())
    loss = sq(s.model)
    gc.collect()
    assert all(ref() is None for layer in s.model.layers for ref in layer.alive)
    assert s.activations.bytes_held == 4 * 10 * 8 * 4
    loss.backward()
    assert all(ref() is None for layer in s.model.layers for ref in layer.alive)
    del loss
    s.finish()
