"""Tensor parallelism: the layers of one replica are split over the ranks of a tensor group.

    group = init_device_mesh("cuda", (2,), mesh_dim_names=("tensor",))
    split = tensor_parallel(model, group)
    loss = model(tokens, labels=tokens).loss          # as before, and equal on both ranks
    whole = split.whole_value("lm_head.weight", model.lm_head.weight)

Each rank's parameters are plain tensors under the model's own names: its part of those that are
split, all of the others. They stay the same objects, so optimizers and stages need not know. The
others (norms, positions, biases of rows) have equal gradients on all ranks of the group.

Assumes: all ranks of the group get the same micro-batch. The model is that of tensor rank 0: its
values and its random state go to the others. Does NOT split the sequence, nor layers over hosts.
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

from roadtrain.errors import ConfigError, DifferError, LoopError, ModelError, UserError
from roadtrain.options.names import did_you_mean
from roadtrain.stages.tensor_families import family_plan
from roadtrain.stages.tensor_split import TensorSplit
from roadtrain.stages.tensor_styles import (
    TensorGroup,
    TensorStyle,
    own_style,
    random_state,
    set_random_state,
)

TensorPlan = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class TensorParallel:
    """What a tensor group made of a model.

    mesh: of the group. shapes: of all whole parameters, by name. splits: of those that are split;
    every other is whole on every rank."""

    mesh: DeviceMesh
    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, TensorSplit]

    @property
    def rank(self) -> int:
        """In the group."""
        return int(self.mesh.get_local_rank())

    @property
    def degree(self) -> int:
        return int(self.mesh.size())

    def __str__(self) -> str:
        whole = sum(math.prod(shape) for shape in self.shapes.values())
        split = sum(one.numel for one in self.splits.values())
        return (
            f"{len(self.splits)} of {len(self.shapes)} parameters, {split / whole:.1%} of their"
            f" elements, are split over {self.degree} ranks"
        )

    def counts(self, name: str) -> bool:
        """Whether this rank counts the gradient of parameter `name` in a norm over all ranks:
        what all ranks have alike is counted by the first."""
        return name in self.splits or self.rank == 0

    def local_value(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A copy of what this rank has of parameter `name` (or of something of its shape).
        Raises ConfigError for another shape than the whole parameter has."""
        if tuple(whole.shape) != self.shapes[name]:
            raise ConfigError(
                f"{name} is {tuple(whole.shape)}, the whole parameter is {self.shapes[name]}"
            )
        split = self.splits.get(name)
        return whole.clone() if split is None else split.local_value(whole, self.rank)

    def whole_value(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The whole of what each rank has of parameter `name`, or of its gradient. Collective
        over the group, on the mesh's device."""
        split = self.splits.get(name)
        if split is None:
            return local.detach().clone()
        own = local.detach().to(device_of(self.mesh)).contiguous()
        found = [torch.empty_like(own) for _ in range(self.degree)]
        dist.all_gather(found, own, group=self.mesh.get_group())
        return split.whole_value(found).to(local.device)

    def check_random_state(self) -> None:
        """Raise DifferError where the ranks of the group would draw different random numbers
        (dropout would differ where their activations agree). Collective over the group."""
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
                    hint="seed all ranks of a tensor group alike",
                )


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks: Sequence[str] | None = None,
    plan: TensorPlan | None = None,
) -> TensorParallel:
    """Split `model` in place over the ranks of `mesh`, which has one dimension. Collective.

    blocks: names of those that are here, where the model is cut into stages. plan: a style for
    each pattern of layer names, one pattern part a name part (`layers.*.attn.out`); None for what
    is known of the architecture. Layers that it does not name stay whole.

    Raises ModelError for an architecture that is not known, a layer that cannot be split or a
    block of which nothing is; ConfigError for heads or widths that do not divide and patterns
    that match nothing; LoopError where a parameter has a gradient. The model is as it was then.
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
    """Layers that the plan's patterns name, the first that does. Raises ConfigError where the
    `whole` model is here and a pattern names none."""
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
            f"no layer is called {wrong!r}", hint=did_you_mean(wrong, modules) or "see the plan"
        )


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _is_here(module: nn.Module) -> bool:
    """Whether this stage has its parameters; a layer of which it has none is not split."""
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) or not hasattr(module, "weight")


def _check_no_gradient(names: Mapping[str, nn.Parameter]) -> None:
    for name, p in names.items():
        if p.grad is not None:
            raise LoopError(
                f"parameter {name!r} has a gradient of the whole shape",
                hint="split the model before its first backward",
            )


def _check_blocks(blocks: Sequence[str], styles: Mapping[str, TensorStyle]) -> None:
    for block in blocks:
        if not any(name == block or name.startswith(block + ".") for name in styles):
            raise ModelError(
                f"nothing of block {block!r} is split by tensor parallelism",
                hint="name its layers in a plan: {name pattern: style}",
            )


def _splits(
    model: nn.Module, styles: Mapping[str, TensorStyle], degree: int
) -> dict[nn.Parameter, TensorSplit]:
    """How each parameter is split that is. Raises as the styles do, and ModelError where layers
    that share a parameter do not agree."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for inside, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((name, inside))
    wanted: dict[tuple[str, str], TensorSplit] = {}
    for name, style in styles.items():
        try:
            found = style.splits(model.get_submodule(name), degree)
        except UserError as cause:
            raise type(cause)(f"{name}: {cause}") from cause
        wanted |= {(name, inside): split for inside, split in found.items()}
    out = {}
    for p, places in owners.items():
        first = wanted.get(places[0])
        for place in places[1:]:
            if wanted.get(place) != first:
                raise ModelError(
                    f"{'.'.join(places[0])} and {'.'.join(place)} are one parameter, which tensor"
                    " parallelism would split in one of them or otherwise",
                    hint="name both layers in the plan, or neither",
                )
        if first is not None:
            out[p] = first
    return out


def _broadcast_start(model: nn.Module, mesh: DeviceMesh) -> None:
    """Rank 0's values and random state on all ranks of the group, a parameter at a time."""
    device = device_of(mesh)
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_meta:
            with torch.no_grad():
                value.copy_(_from_first(value.detach(), mesh))
    for at in _random_devices(device):
        set_random_state(_from_first(random_state(at), mesh), at)


def _from_first(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Rank 0's `value`, on the device where the own is."""
    sent = value.to(device_of(mesh), copy=True).contiguous()
    first = int(mesh.mesh.flatten()[0])
    # as bytes: not every backend knows every dtype
    dist.broadcast(sent.flatten().view(torch.uint8), first, group=mesh.get_group())
    return sent.to(value.device)


def _random_devices(device: torch.device) -> list[torch.device]:
    """The host and `device`: each has a random generator."""
    return list(dict.fromkeys((torch.device("cpu"), device)))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's own of the mesh's kind."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
