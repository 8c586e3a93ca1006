"""How single layers are split over a tensor group: styles for torch's `parallelize_module`.

    Column      outputs are split: y_j = x W_j. Backward sums the gradient of x over the group.
    Row         inputs are split: y = sum of x_j W_j, and the bias is added once, to the sum.
    Vocabulary  rows of an embedding are split: a rank looks up its own tokens, the group sums.
    Summed      a whole layer between a Column and a Row: it sees a rank's own heads, so that its
                gradients are summed over the group.
    LocalHeads  attributes of a module that count heads or their width become the rank's own.

Parameters stay plain tensors under their own names, each rank has its part (TensorSplit): whatever
updates them needs not know. Activations cross the group as DTensors. As in Shoeybi et al. (2019),
section 3: an all-reduce in the forward of a Row, one in the backward of the Columns before it.

Random numbers: the ranks of a group draw the same ones where they all have the same activations,
and each draws its own between a Column and a Row, where each has other ones (dropout of attention).
The own ones are seeded by a number that all draw, so that a forward that is repeated from the same
random state, for activation checkpointing, repeats them.

Assumes: a layer's input is the same on all ranks of the group, but for a Row's.
Does NOT split the sequence.
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

from roadtrain.errors import ConfigError, ModelError
from roadtrain.stages.tensor_split import TensorSplit

_SEEDS = 1 << 62


class TensorGroup:
    """The ranks of one replica that split their layers, and what goes between them.

    mesh: of one dimension. cut: parameters that are this rank's part by now: one of two layers
    (tied embeddings) is cut once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.degree: int = mesh.size()
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None
        self._outside: tuple[torch.device, torch.Tensor] | None = None
        self.cut: set[nn.Parameter] = set()

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """x; backward sums its gradient over the group. Layers that take the same x in turn
        (queries, keys and values) share one, so that backward sums once."""
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
        """The sum of x over the group; backward passes the gradient on as it is."""
        partial = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """The last dimensions of all ranks behind each other; backward takes the own part."""
        local = DTensor.from_local(x, self.mesh, [Shard(-1)], run_check=False)
        return local.redistribute(placements=[Replicate()]).to_local()

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the group, without autograd."""
        with torch.no_grad():
            return self.summed(x)

    def draw_own(self, device: torch.device) -> None:
        """Random numbers are the rank's own from now on."""
        if self._outside is not None:
            return
        seed = int(torch.randint(_SEEDS, ())) + self.rank
        self._outside = device, random_state(device)
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(device).manual_seed(seed)

    def draw_alike(self) -> None:
        """Random numbers are the same on all ranks again."""
        if self._outside is None:
            return
        device, state = self._outside
        self._outside = None
        set_random_state(state, device)

    def keep_own_part(self, p: nn.Parameter, split: TensorSplit) -> None:
        """p holds this rank's part of its values from now on; it stays the same object, which
        optimizers know."""
        if p not in self.cut:
            self.cut.add(p)
            p.data = split.local_value(p.data, self.rank)


def random_state(device: torch.device) -> torch.Tensor:
    """uint8, on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class SplitLayer(nn.Module):
    """What the classes below add to a layer's own class."""

    group: TensorGroup  # the ranks that share the layer
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool  # the weight is [inputs, outputs], as transformers' Conv1D has it
    outputs: int | None  # of the whole layer, where they are gathered
    padding_idx: int | None  # of an embedding: a token without a gradient
    num_embeddings: int  # of an embedding: tokens of the whole vocabulary


class ColumnLayer(SplitLayer):
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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.group.forget_copied()
        self.group.draw_alike()
        product = x @ self.weight if self.transposed else F.linear(x, self.weight)
        out = self.group.summed(product)
        return out if self.bias is None else out + self.bias


class VocabularyLayer(SplitLayer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.group.rank * len(self.weight)
        places = tokens - first
        own = (places >= 0) & (places < len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        known = (tokens >= 0) & (tokens < self.num_embeddings)
        # -1: torch refuses what is in no vocabulary, as it does in the whole layer (Rule 6)
        rows = F.embedding(places.where(own, 0).where(known, -1), self.weight, padding)
        return self.group.summed(rows.where(own.unsqueeze(-1), 0))


class TensorStyle(ParallelStyle):
    """One of the styles of this file. They are values; `within` gives one that torch applies."""

    group: TensorGroup

    def within(self, group: TensorGroup) -> TensorStyle:
        bound = copy.copy(self)
        bound.group = group
        return bound

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        """How its parameters are split, by their names in `module`; those left out stay whole.
        Raises ModelError for a layer that cannot be split so, ConfigError where it does not
        divide. Changes nothing."""
        return {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, split in self.splits(module, self.group.degree).items():
            self.group.keep_own_part(getattr(module, name), split)
        self.change(module)
        return module

    def change(self, module: Any) -> None:
        """Make `module`, whose parameters are the rank's own by now, work on them."""
        raise NotImplementedError


class Column(TensorStyle):
    """parts: matrices that the layer holds behind each other (3 for queries, keys and values),
    each split for itself. gather: all outputs on all ranks (logits); these need not divide."""

    def __init__(self, parts: int = 1, gather: bool = False) -> None:
        self.parts, self.gather = parts, gather

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        dim = 1 if _transposed(module) else 0
        if self.gather and (dim == 1 or self.parts > 1):
            raise ModelError(
                "only the outputs of an nn.Linear of one part are gathered", hint="Column() and Row"
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
    """The bias is whole on every rank."""

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        dim = 0 if _transposed(module) else 1
        return {"weight": TensorSplit(tuple(module.weight.shape), dim, degree)}

    def change(self, module: Any) -> None:
        _become(module, RowLayer, self.group, transposed=_transposed(module))


class Vocabulary(TensorStyle):
    """Rows of an embedding; they need not divide."""

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        if not isinstance(module, nn.Embedding):
            raise ModelError(
                f"a {type(module).__name__} has no vocabulary", hint="an nn.Embedding has"
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ModelError(
                "an embedding with max_norm, sparse or scale_grad_by_freq cannot be split",
                hint="leave it whole: take it out of the plan",
            )
        return {"weight": TensorSplit(tuple(module.weight.shape), 0, degree, padded=True)}

    def change(self, module: Any) -> None:
        _become(module, VocabularyLayer, self.group)


class Summed(TensorStyle):
    def change(self, module: Any) -> None:
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(self.group.total)


class LocalHeads(TensorStyle):
    """names: attributes of the module, each of which is divided by the degree."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def splits(self, module: Any, degree: int) -> dict[str, TensorSplit]:
        for name in self.names:
            count = getattr(module, name, None)
            if not isinstance(count, int):
                raise ModelError(f"a {type(module).__name__} counts no {name}")
            if count % degree:
                raise ConfigError(
                    f"{name} {count} cannot be split over tp {degree}", hint=f"tp divides {count}"
                )
        return {}

    def change(self, module: Any) -> None:
        for name in self.names:
            setattr(module, name, getattr(module, name) // self.group.degree)


def own_style(style: ParallelStyle, module: nn.Module) -> TensorStyle:
    """A style of this file that does what torch's own `style` does to `module`. Raises ModelError
    for one that has no such."""
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
        f"{style} of a {type(module).__name__} is not known here",
        hint="known are Column, Row, Vocabulary, Summed and LocalHeads of"
        " roadtrain.stages.tensor_styles, and ColwiseParallel and RowwiseParallel of torch with"
        " their own layouts",
    )


def _transposed(module: nn.Module) -> bool:
    """Whether its weight is [inputs, outputs]. Raises ModelError for what is no linear layer."""
    if isinstance(module, SplitLayer):
        raise ModelError(
            "the layer is split already", hint="name it in one pattern, call tensor_parallel once"
        )
    if isinstance(module, nn.Linear):
        return False
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return True
    raise ModelError(
        f"a {type(module).__name__} cannot be split by rows or columns",
        hint="an nn.Linear or transformers' Conv1D can",
    )


def _become(module: nn.Module, kind: type[SplitLayer], group: TensorGroup, **more: Any) -> None:
    """Its class becomes one of both, under its own name; it stays an instance of its own."""
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})
    for name, value in {"group": group, **more}.items():
        setattr(module, name, value)
