"""Places where models can be cut, values that cross a cut, and a stage that runs the model's
forward."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from roadtrain.errors import ConfigError, LoopError, ModelError
from roadtrain.stages.cuts import BlockOutput, Cuts, Segment
from roadtrain.stages.layout import StageLayout
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.protocol.pipeline import BACKWARD
from roadtrain.stages.stage_model import MicroBatch, StageModel
from roadtrain.stages.stage_part import StagePart

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 50}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4}
KINDS = {
    "llama": SMALL | ATTENTION,
    "gemma3_text": SMALL | ATTENTION | {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": SMALL | ATTENTION,
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 50},
    "mamba": SMALL,
    # shapes inside its blocks depend on the router's values
    "mixtral": SMALL | ATTENTION | {"num_key_value_heads": 2, "num_local_experts": 3},
}


class Block(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind  # read by the model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """A chain of blocks. skip: Pass the result of block 0 to block 3 as well. shared: Pass a common
    scale to all blocks."""

    def __init__(self, skip: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.blocks = nn.ModuleList(Block(f"kind {i}") for i in range(4))
        self.head = nn.Linear(4, 2)
        self.skip, self.shared = skip, shared
        self.kinds: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None
        for number, block in enumerate(self.blocks):
            self.kinds.append(block.kind)
            x = block(x * self.scale if self.shared else x)
            first = x if number == 0 else first
            if self.skip and number == 2:
                x = x + first
        return self.head(x)


def in_stages(model, cuts, stages, batch):
    """Compute the model's result in stages, each in a copy of the model."""
    received = ()
    for segment in stages:
        own = StageModel(copy.deepcopy(model), cuts, [segment])
        own.attach()
        ended, value = own.run(segment, received, batch)
        if not ended:
            received = tuple(x.detach() for x in BlockOutput.of(value).tensors)
    assert ended
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_stages_of_hugging_face_models_give_the_result_of_the_model(kind: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    x = torch.randint(0, 50, (2, 8))
    batch = MicroBatch((), {"input_ids": x, "use_cache": False})
    cuts = Cuts(model, (), batch.kwargs)
    with torch.no_grad():
        got = in_stages(model, cuts, [Segment(0, 1), Segment(1, 3), Segment(3, 4)], batch)
        assert torch.equal(got.logits, model(input_ids=x, use_cache=False).logits)


def test_every_parameter_belongs_to_a_stage_and_tied_ones_to_two() -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL, **ATTENTION)
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    cuts = Cuts(model, (), {"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    layout = StageLayout.of(Parallelism(pp=2), cuts)
    every = {name for name, _ in model.named_parameters()}
    assert frozenset.union(*layout.names) == every
    assert layout.shared() == {(0, 1): ("model.embed_tokens.weight",)}
    (group,) = layout.shared_groups()
    assert group.ranks == (0, 1)
    three = StageLayout.of(Parallelism(pp=2, widths=(2, 1)), cuts)
    assert three.shared_groups()[0].ranks == (0, 1, 2)


def test_a_parameter_used_by_all_blocks_belongs_to_all_stages() -> None:
    cuts = Cuts(Chain(shared=True), (torch.zeros(2, 4),), {})
    layout = StageLayout.of(Parallelism(pp=3, stages=(1, 1, 2)), cuts)
    assert layout.stages_of("scale") == (0, 1, 2)
    assert layout.stages_of("head.weight") == (2,)


class WithoutGradient(Chain):
    """Parameters and block results that affect the loss but get no gradient."""

    def __init__(self, bypass: str = "") -> None:
        super().__init__()
        self.limit = nn.Parameter(torch.full((4,), 0.25))
        self.order = nn.Parameter(torch.tensor([3, 1, 2, 0]), requires_grad=False)
        self.idle = nn.Linear(4, 4)
        self.blocks[2].idle = nn.Linear(2, 2)
        self.bypass = bypass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = None
        for number, block in enumerate(self.blocks):
            if number == 3:
                x = torch.where(small if self.bypass else x > self.limit, x, 2 * x)
            x = block(x)
            if number == 1:
                small = x < 0 if self.bypass else None
        return self.head(x[:, self.order])


def test_values_without_a_gradient_are_passed_on_too() -> None:
    """Values used in a comparison, as an index, or not at all: never NaN or the least integer (Rule
    6)."""
    torch.manual_seed(0)
    model, x = WithoutGradient(), torch.randn(3, 4)
    cuts = Cuts(model, (x,), {})
    layout = StageLayout.of(Parallelism(pp=2), cuts)
    assert frozenset.union(*layout.names) == {name for name, _ in model.named_parameters()}
    assert layout.stages_of("limit") == layout.stages_of("order") == (1,)
    assert layout.stages_of("blocks.2.idle.weight") == (1,)
    assert layout.stages_of("idle.bias") == (0,)
    want = model(x)
    assert torch.equal(in_stages(model, cuts, layout.segments, MicroBatch((x,))), want)


def test_a_value_without_a_gradient_that_bypasses_a_cut_is_refused() -> None:  # Rule 6
    cuts = Cuts(WithoutGradient("mask"), (torch.zeros(2, 4),), {})
    with pytest.raises(ModelError, match=r"before blocks 3 to 3: .* results of 'blocks\.1'"):
        cuts.parameters(Segment(3, 4))
    assert "limit" not in cuts.parameters(Segment(2, 4))


def test_the_recording_changes_nothing() -> None:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    model = Chain()
    model.blocks[1] = Counts()
    model.first, model.last = nn.BatchNorm1d(4), nn.BatchNorm1d(2)
    blocks, head = model.forward, model.head
    model.head = nn.Sequential(head, model.last)
    model.forward = lambda x: blocks(model.first(x))
    before = {name: b.clone() for name, b in model.named_buffers()}
    Cuts(model, (torch.randn(3, 4),), {})
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    # even for a module with two names
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in model.last.parameters())
    assert "forward" not in model.blocks[1].__dict__


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    class Recomputed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(x)

    torch.manual_seed(0)
    model, x = Recomputed(), torch.randn(3, 4)
    model(x).sum().backward()
    cuts, own = Cuts(model, (x,), {}), copy.deepcopy(model)
    own.zero_grad()
    stage_model = StageModel(own, cuts, [Segment(0, 2)])
    stage_model.attach()
    part = StagePart(stage_model, Segment(0, 2), None)
    if reentrant:  # Rule 6: otherwise the layer would not be trained
        with pytest.raises(ModelError, match=r"result of block 'blocks\.1' has no gradient"):
            part.run_forward(0, MicroBatch((x,)))
        return
    (out,) = part.run_forward(0, MicroBatch((x,)))
    received = out.clone().requires_grad_()
    rest = copy.deepcopy(model)
    rest.head(rest.blocks[3](rest.blocks[2](received))).sum().backward()
    part.buffers(BACKWARD, 0)[0].copy_(received.grad)
    part.run_backward(0, None)
    for name, p in own.named_parameters():
        assert torch.equal(p.grad, model.get_parameter(name).grad), name


def test_micro_batches_of_other_shapes_are_refused() -> None:  # Rule 6
    """Their activations would fill only part of the next stage's buffer."""
    stage_model = StageModel(
        model := Chain(), Cuts(model, (torch.zeros(3, 4),), {}), [Segment(0, 2)]
    )
    stage_model.attach()
    part = StagePart(stage_model, Segment(0, 2), None)
    part.run_forward(0, MicroBatch((torch.zeros(3, 4),)))
    with pytest.raises(ModelError, match=r"returned \(2, 4\) torch.float32, but \(3, 4\) torch"):
        part.run_forward(0, MicroBatch((torch.zeros(2, 4),)))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ModelError, match=r"returned \(3, 4\) torch.bfloat16, but \(3, 4\) torch"),
    ):
        part.run_forward(0, MicroBatch((torch.zeros(3, 4),)))


def test_parts_without_blocks_are_refused() -> None:
    cuts = Cuts(Chain(), (torch.zeros(2, 4),), {})
    with pytest.raises(ConfigError, match="stages have 0, 1, 2, 1 blocks"):
        StageLayout.of(Parallelism(pp=2, virtual_stages=2, stages=(0, 1, 2, 1)), cuts)


def test_a_value_that_bypasses_a_cut_is_refused() -> None:  # Rule 6
    cuts = Cuts(Chain(skip=True), (torch.zeros(2, 4),), {})
    with pytest.raises(ModelError, match=r"before blocks 2 to 3: .* results of 'blocks\.0'"):
        cuts.parameters(Segment(2, 4))
    assert "head.weight" in cuts.parameters(Segment(1, 4))  # nothing bypasses this cut


def test_a_stub_has_the_attributes_of_its_block_and_the_stage_its_names() -> None:
    model, x = Chain(), torch.randn(2, 4)
    cuts = Cuts(model, (x,), {})
    stage = StageModel(model, cuts, [Segment(2, 4)])
    stage.attach()
    model.kinds.clear()
    stage.run(Segment(2, 4), [x], MicroBatch((x,)))
    assert model.kinds == [f"kind {i}" for i in range(4)]
    names = {name for name, _ in model.named_parameters()}
    assert (
        names
        == stage.names
        == {
            "blocks.2.linear.weight",
            "blocks.2.linear.bias",
            "blocks.3.linear.weight",
            "blocks.3.linear.bias",
            "head.weight",
            "head.bias",
        }
    )


def test_a_restored_model_can_be_cut_again() -> None:
    model, x = Chain(), torch.randn(2, 4)
    want = model(x)
    order = [name for name, _ in model.named_parameters()]
    cuts = Cuts(model, (x,), {})
    stage = StageModel(model, cuts, [Segment(0, 2)])
    stage.attach()
    stage.restore()
    assert [name for name, _ in model.named_parameters()] == order
    assert torch.equal(model(x), want)


def test_a_stage_called_as_a_whole_is_refused() -> None:
    model, x = Chain(), torch.zeros(2, 4)
    stage = StageModel(model, Cuts(model, (x,), {}), [Segment(0, 2)])
    stage.attach()
    with pytest.raises(LoopError, match="this rank has only blocks 0 to 1 of the model"):
        model(x)


def test_models_that_cannot_be_recorded_are_refused() -> None:
    class Twice(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x) @ torch.ones(2, 4))

    with pytest.raises(ModelError, match="runs twice in one forward"):
        Cuts(Twice(), (torch.zeros(2, 4),), {})

    class Short(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](x))

    with pytest.raises(ModelError, match="3 of the model's 4 blocks did not run"):
        Cuts(Short(), (torch.zeros(2, 4),), {})

    class ByValue(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.scale.sum() > 0 else x

    with pytest.raises(ModelError, match="forward failed on the meta device"):
        Cuts(ByValue(), (torch.zeros(2, 4),), {})


def test_a_model_computes_in_the_dtype_of_its_cuts() -> None:
    model, x = Chain(shared=True), torch.zeros(2, 4, dtype=torch.bfloat16)
    cuts = Cuts(model, (x,), {}, dtype=torch.bfloat16)
    assert [t.dtype for t in cuts.crossing(2)] == [torch.bfloat16]
    assert cuts.dtype_of(torch.zeros(1, dtype=torch.int64)) == torch.int64
