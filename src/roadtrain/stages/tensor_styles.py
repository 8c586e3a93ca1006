"""Styles for torch's `parallelize_module`, which split single layers over a tensor group. Does NOT
split the sequence.

    Column      splits the outputs: y_j = x W_j. Backward sums the gradient of x over the group.
    Row         splits the inputs: y = sum of x_j W_j. The bias is added once, to the sum.
    Vocabulary  splits the rows of an embedding: each rank looks up its own tokens, then the group
                sums the results.
    Summed      is for a layer between a Column and a Row, and not split. Each rank has only its
                own heads as input, so gradients of the parameters are summed over the group.
    LocalHeads  divides attributes of a module by the degree: numbers of heads, or the total width
                of the heads.

As in Shoeybi et al. (2019), section 3, the forward of a Row runs one all-reduce, and so does the
backward of the Columns before it. All ranks must get the same input of a layer, except of a Row.

Note "random numbers": where all ranks of a group have the same activations, they draw the same
random numbers. Between a Column and a Row, each rank draws (attention dropout) with its own seed,
which is drawn from the common random state. So a repeated forward (activation checkpointing) draws
the same numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from roadtrain.device.accelerator import random_state, set_random_state
from roadtrain.errors import ConfigError, ModelError
from roadtrain.stages.tensor_split import TensorSplit

_SEEDS = 1 << 62


class TensorGroup:
    """The ranks that share the layers of one replica, between which the methods communicate.

    mesh: a one-dimensional device mesh. `cut`: the parameters already cut to this rank's share,
    since layers may share a parameter (tied embeddings).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.degree: int = mesh.size()
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None
        self._outside: tuple[torch.device, torch.Tensor] | None = None
        self.cut: set[nn.Parameter] = set()

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the values of x, whose gradient is summed over the group.
        Consecutive calls with the same x (for queries, keys and values) return the same tensor, so
        that backward sums only once."""
        if self._copied is not None and self._copied[0] is x:
            return self._copied[1]
        out = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        self._copied = (x, out)
        return out

    def forget_copied(self) -> None:
        self._copied = None

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the group. Backward passes the gradient through unchanged."""
        partial = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors x of all ranks, concatenated in the last dimension. Backward returns
        this rank's share of the gradient."""
        local = DTensor.from_local(x, self.mesh, [Shard(-1)], run_check=False)
        return local.redistribute(placements=[Replicate()]).to_local()

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the group, without autograd."""
        with torch.no_grad():
            return self.summed(x)

    def draw_own(self, device: torch.device) -> None:
        """Switch torch's random numbers to this rank's own seed until `draw_alike` (Note "random
        numbers")."""
        if self._outside is not None:
            return
        seed = int(torch.randint(_SEEDS, ())) + self.rank
        self._outside = device, random_state(device)
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device).manual_seed(seed)

    def draw_alike(self) -> None:
        """Restore the random state that all ranks had in common before `draw_own`."""
        if self._outside is None:
            return
        device, state = self._outside
        self._outside = None
        set_random_state(state, device)

    def keep_own_part(self, p: nn.Parameter, split: TensorSplit) -> None:
        """Replace the values of p by this rank's share of them. p stays the same object for
        optimizers."""
        if p not in self.cut:
            self.cut.add(p)
            p.data = split.local_value(p.data, self.rank)


class SplitLayer(nn.Module):
    """The base class of ColumnLayer, RowLayer and VocabularyLayer. A split layer's class becomes a
    subclass of one of these and of its previous class."""

    group: TensorGroup  # the ranks that share the layer
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool  # whether the weight is [inputs, outputs], as in transformers' Conv1D
    outputs: int | None  # number of outputs of the whole layer if they are gathered, else None
    padding_idx: int | None  # for an embedding, the token without a gradient
    num_embeddings: int  # for an embedding, the size of the whole vocabulary


class ColumnLayer(SplitLayer):
    """A linear layer that computes this rank's outputs. If `outputs` is not None, it also gathers
    all ranks' outputs to this number of columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.group.copied(x)
        if self.outputs is not None:
            self.group.forget_copied()
            whole = self.group.gathered(super().forward(own))
            return whole[..., : self.outputs]
        if self.training:
            self.group.draw_own(x.device)
        out: torch.Tensor = super().forward(own)
        return out


class RowLayer(SplitLayer):
    """A linear layer that multiplies this rank's inputs, and sums the products over the group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.group.forget_copied()
        self.group.draw_alike()
        product = x @ self.weight if self.transposed else F.linear(x, self.weight)
        out = self.group.summed(product)
        return out if self.bias is None else out + self.bias


class VocabularyLayer(SplitLayer):
    """An embedding that looks up this rank's tokens, and sums the results over the group."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.group.rank * len(self.weight)
        places = tokens - first
        own = (places >= 0) & (places < len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        valid = (tokens >= 0) & (tokens < self.num_embeddings)
        # -1 makes torch refuse a token outside of the vocabulary, as the unsplit layer does (Rule
        # 6)
        rows = F.embedding(places.where(own, 0).where(valid, -1), self.weight, padding)
        return self.group.summed(rows.where(own.unsqueeze(-1), 0))


class TensorStyle(ParallelStyle):
    """The base class of the styles, which are plain values. `within` returns a copy for a group of
    ranks, which torch's `parallelize_module` can apply to a layer."""

    group: TensorGroup

    def within(self, group: TensorGroup) -> TensorStyle:
        bound = copy.copy(self)
        bound.group = group
        return bound

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        """Return the split of each parameter of `module` that the style splits, by the parameter's
        name in the module. Raises ModelError if the style cannot split such a layer, and
        ConfigError if `degree` does not divide the split dimension or a number of heads."""
        return {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, split in self.splits(module, self.group.degree).items():
            self.group.keep_own_part(getattr(module, name), split)
        self.change(module)
        return module

    def change(self, module: Any) -> None:
        """Adapt `module` after its parameters have been cut to this rank's shares."""
        raise NotImplementedError


class Column(TensorStyle):
    """A style that splits the outputs of a linear layer. parts: the number of matrices that the
    layer concatenates (3 for queries, keys and values), each of which is split. gather: whether
    every rank gathers the outputs of all ranks, as for logits; then the degree need not divide
    them."""

    def __init__(self, parts: int = 1, gather: bool = False) -> None:
        self.parts, self.gather = parts, gather

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        dim = 1 if _transposed(module) else 0
        if self.gather and (dim == 1 or self.parts > 1):
            raise ModelError(
                "Column(gather=True) needs an nn.Linear, and does not support parts > 1",
                hint="use Column() without gather, followed by Row()",
            )

        def split(p: torch.Tensor, dim: int) -> TensorSplit:
            return TensorSplit(tuple(p.shape), dim, degree, self.parts, padded=self.gather)

        out = {"weight": split(module.weight, dim)}
        return out if module.bias is None else {**out, "bias": split(module.bias, 0)}

    def change(self, module: Any) -> None:
        if _transposed(module):
            module.nf = module.weight.shape[1]
        outputs = module.out_features if self.gather else None
        _become(module, ColumnLayer, self.group, outputs=outputs)


class Row(TensorStyle):
    """A style that splits the inputs of a linear layer. Every rank has the complete bias."""

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        dim = 0 if _transposed(module) else 1
        return {"weight": TensorSplit(tuple(module.weight.shape), dim, degree)}

    def change(self, module: Any) -> None:
        _become(module, RowLayer, self.group, transposed=_transposed(module))


class Vocabulary(TensorStyle):
    """A style that splits the rows of an embedding. The degree need not divide their number."""

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        if not isinstance(module, nn.Embedding):
            raise ModelError(
                f"the style Vocabulary cannot split a {type(module).__name__}",
                hint="use Vocabulary only for an nn.Embedding",
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ModelError(
                "an embedding with max_norm, sparse or scale_grad_by_freq cannot be split",
                hint="remove the embedding from the plan, so that the embedding is not split",
            )
        return {"weight": TensorSplit(tuple(module.weight.shape), 0, degree, padded=True)}

    def change(self, module: Any) -> None:
        _become(module, VocabularyLayer, self.group)


class Summed(TensorStyle):
    """A style that does not split a layer, and sums the gradients of its parameters over the
    group."""

    def change(self, module: Any) -> None:
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(self.group.total)


class LocalHeads(TensorStyle):
    """A style that divides integer attributes of a module by the degree. names: the attributes."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        for name in self.names:
            count = getattr(module, name, None)
            if not isinstance(count, int):
                raise ModelError(f"a {type(module).__name__} has no integer attribute {name}")
            if count % degree:
                hint = f"set tp to a divisor of {count}"
                raise ConfigError(f"{name} = {count} cannot be divided by tp = {degree}", hint=hint)
        return {}

    def change(self, module: Any) -> None:
        for name in self.names:
            setattr(module, name, getattr(module, name) // self.group.degree)


def own_style(style: ParallelStyle, module: nn.Module) -> TensorStyle:
    """Return the TensorStyle that is equivalent to `style`, which may be a style of torch, for the
    layer `module`. Raises ModelError if there is none."""
    if isinstance(style, TensorStyle):
        return style
    plain = (Shard(-1),), (Replicate(),)
    if isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear):
        if style.input_layouts == plain[1] and style.output_layouts in plain:
            return Column(gather=style.output_layouts == plain[1])
    elif isinstance(style, RowwiseParallel) and style.output_layouts == plain[1]:
        if isinstance(module, nn.Embedding):
            return Vocabulary()
        if style.input_layouts == plain[0]:
            return Row()
    raise ModelError(
        f"{style} of a {type(module).__name__} is not supported",
        hint="use Column, Row, Vocabulary, Summed or LocalHeads of roadtrain.stages.tensor_styles,"
        " or torch's ColwiseParallel or RowwiseParallel with default layouts",
    )


def _transposed(module: nn.Module) -> bool:
    """Return whether the layer's weight has the shape [inputs, outputs]. Raises ModelError if the
    layer is not linear."""
    if isinstance(module, SplitLayer):
        raise ModelError(
            "the layer is split already", hint="call tensor_parallel only once for a model"
        )
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return True
    raise ModelError(
        f"a {type(module).__name__} cannot be split by rows or columns",
        hint="split an nn.Linear or transformers' Conv1D",
    )


def _become(module: nn.Module, kind: type[SplitLayer], group: TensorGroup, **more: Any) -> None:
    """Change the class of the module to a subclass of `kind` and of its own class, and set
    attributes."""
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})
    for name, value in {"group": group, **more}.items():
        setattr(module, name, value)
