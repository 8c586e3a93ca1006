"""Tensor parallelism: split the layers of one replica over the ranks of a tensor group. Does NOT
split the sequence, or layers over several hosts.

    group = init_device_mesh("cuda", (2,), mesh_dim_names=("tensor",))
    split = tensor_parallel(model, group)
    loss = model(tokens, labels=tokens).loss          # as before, and equal on both ranks
    whole = split.whole_value("lm_head.weight", model.lm_head.weight)

A rank's parameters are plain tensors under the model's own names, and stay the same Python objects.
Parameters that are not split (norms, positions) have equal gradients on all ranks of the group.

All ranks of the group must get the same micro-batch. Values and random state of tensor rank 0 are
copied to the other ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from roadtrain.device.accelerator import random_state, set_random_state
from roadtrain.errors import ConfigError, DifferError, LoopError, ModelError, UserError
from roadtrain.options.names import did_you_mean
from roadtrain.stages.tensor_families import family_plan
from roadtrain.stages.tensor_split import TensorSplit
from roadtrain.stages.tensor_styles import TensorGroup, TensorStyle, own_style

TensorPlan = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class TensorParallel:
    """The splits of a model's parameters over a tensor group.

    mesh: the group's device mesh. shapes: the shape of each parameter before the split, by name.
    splits: parameter name -> split, without the parameters that every rank has completely.
    """

    mesh: DeviceMesh
    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, TensorSplit]

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return int(self.mesh.get_local_rank())

    @property
    def degree(self) -> int:
        return int(self.mesh.size())

    def __str__(self) -> str:
        whole = sum(math.prod(shape) for shape in self.shapes.values())
        split = sum(s.numel for s in self.splits.values())
        return (
            f"{len(self.splits)} of {len(self.shapes)} parameters, {split / whole:.1%} of their"
            f" elements, are split over {self.degree} ranks"
        )

    def counts(self, name: str) -> bool:
        """Return whether this rank includes the gradient of the parameter `name` in a norm over all
        ranks. Parameters that are not split count on the first rank only."""
        return name in self.splits or self.rank == 0

    def local_value(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's share of `whole`, which has the shape of the complete
        parameter `name`. Raises ConfigError if it has another shape."""
        if tuple(whole.shape) != self.shapes[name]:
            raise ConfigError(
                f"{name!r} got {tuple(whole.shape)}, but the whole parameter is {self.shapes[name]}"
            )
        split = self.splits.get(name)
        return whole.clone() if split is None else split.local_value(whole, self.rank)

    def whole_value(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor, gathered from all ranks. Collective. local: this rank's share
        of the parameter `name` or of its gradient."""
        split = self.splits.get(name)
        if split is None:
            return local.detach().clone()
        own = local.detach().to(device_of(self.mesh)).contiguous()
        found = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(found, own, group=self.mesh.get_group())
        return split.whole_value(found).to(local.device)

    def check_random_state(self) -> None:
        """Raise DifferError if the ranks of the group would draw different random numbers, since
        activations must be equal on all ranks. Collective."""
        device = device_of(self.mesh)
        states = map(random_state, _random_devices(device))
        digest = hashlib.sha256(b"".join(x.numpy().tobytes() for x in states))
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
        found = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(found, own, group=self.mesh.get_group())
        for rank, other in enumerate(found):
            if not torch.equal(other, found[0]):
                raise DifferError(
                    f"tensor ranks 0 and {rank} of a replica draw different random numbers",
                    hint="set the same seed on all ranks of a tensor group",
                )


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks: Sequence[str] | None = None,
    plan: TensorPlan | None = None,
) -> TensorParallel:
    """Split `model` in place over the ranks of the one-dimensional `mesh`. Collective.

    blocks: the names of this stage's blocks, if the model is cut into stages. plan: pattern of
    layer names -> style; `*` does not match dots (`layers.*.attn.out`), and layers that match no
    pattern are not split. Without a plan, the table of known architectures (tensor_families.py) is
    used.

    Raises ModelError for an unknown architecture, for a layer that cannot be split, and for a block
    without any split layer. Raises ConfigError if tp does not divide a number of heads or a width,
    and for patterns that match nothing. Raises LoopError if a parameter has a gradient. After an
    error, the model is unchanged.
    """
    group = TensorGroup(mesh)
    styles = (
        family_plan(model, group.degree)
        if plan is None
        else dict(_named_styles(model, plan, whole=blocks is None))
    )
    styles = {name: s for name, s in styles.items() if _is_here(model.get_submodule(name))}
    _check_blocks(blocks or (), styles)
    splits = _splits(model, styles, group.degree)
    names = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in names.items()}
    _check_no_gradient(names)
    _broadcast_start(model, mesh)
    parallelize_module(model, mesh, {name: style.within(group) for name, style in styles.items()})
    own = {name: splits[p] for name, p in names.items() if p in splits}
    return TensorParallel(mesh, shapes, own)


def _named_styles(
    model: nn.Module, plan: TensorPlan, *, whole: bool
) -> Iterator[tuple[str, TensorStyle]]:
    """Yield the name and style of each layer that the plan matches; the first matching pattern
    counts. whole: whether all layers are on this rank; then a pattern without a layer raises
    ConfigError."""
    modules = dict(model.named_modules())
    unused = set(plan)
    for name, module in modules.items():
        for pattern, style in plan.items():
            if _matches(name, pattern):
                unused.discard(pattern)
                yield name, own_style(style, module)
                break
    if whole and unused:
        wrong = min(unused)
        raise ConfigError(
            f"no layer is called {wrong!r}", hint=did_you_mean(wrong, modules) or "check the plan"
        )


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _is_here(module: nn.Module) -> bool:
    """Return whether this stage has the layer's parameters."""
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) or not hasattr(module, "weight")


def _check_no_gradient(names: Mapping[str, nn.Parameter]) -> None:
    for name, p in names.items():
        if p.grad is not None:
            raise LoopError(
                f"parameter {name!r} already has a gradient, but is not split yet",
                hint="split the model before its first backward",
            )


def _check_blocks(blocks: Sequence[str], styles: Mapping[str, TensorStyle]) -> None:
    for block in blocks:
        if not any(name == block or name.startswith(block + ".") for name in styles):
            raise ModelError(
                f"no layer of block {block!r} is split by tensor parallelism",
                hint="name layers of the block in a plan: {name pattern: style}",
            )


def _splits(
    model: nn.Module, styles: Mapping[str, TensorStyle], degree: int
) -> dict[nn.Parameter, TensorSplit]:
    """Return parameter -> split. Raises the errors of TensorStyle.splits, and ModelError if layers
    that share a parameter split it differently."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for inside, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((name, inside))
    found: dict[tuple[str, str], TensorSplit] = {}
    for name, style in styles.items():
        try:
            own = style.splits(model.get_submodule(name), degree)
        except UserError as cause:
            raise type(cause)(f"{name}: {cause}") from cause
        found |= {(name, inside): split for inside, split in own.items()}
    out = {}
    for p, places in owners.items():
        first = found.get(places[0])
        for place in places[1:]:
            if found.get(place) != first:
                raise ModelError(
                    f"{'.'.join(places[0])} and {'.'.join(place)} are one parameter, but the"
                    " plan of tensor parallelism does not split both in the same way",
                    hint="give both layers the same style in the plan, or leave out both",
                )
        if first is not None:
            out[p] = first
    return out


def _broadcast_start(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy the values and random states of rank 0 to all ranks of the group."""
    device = device_of(mesh)
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            with torch.no_grad():
                value.copy_(_from_first(value.detach(), mesh))
    for at in _random_devices(device):
        set_random_state(_from_first(random_state(at), mesh), at)


def _from_first(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return rank 0's `value`, on the device of this rank's `value`. Collective."""
    sent = value.to(device_of(mesh), copy=True).contiguous()
    first = int(mesh.mesh.flatten()[0])
    # as bytes, because not every backend supports every dtype
    dist.broadcast(sent.flatten().view(torch.uint8), first, group=mesh.get_group())
    return sent.to(value.device)


def _random_devices(device: torch.device) -> list[torch.device]:
    return list(dict.fromkeys((torch.device("cpu"), device)))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device: the current device of the mesh's device type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
