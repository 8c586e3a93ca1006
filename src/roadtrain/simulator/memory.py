"""Compute how many bytes a plan needs of every memory, and whether the plan fits. The bytes in a
memory are the sum of fixed buffers and of the data of each micro-batch in flight.

Device memory holds parameters, gradients, state, activations of micro-batches in flight and the
logits of the loss. The total of these bytes is multiplied by `plan.framework.fragmentation`. Then
`plan.framework.context_bytes` is added. The placement decides whether a device holds all parameters
of the stage, a part of them, or `plan.memory.slots` blocks. With activation checkpointing, a device
holds the inputs of all blocks, and all activations of one block. Files have two slots for all data
that an update writes, so that a crash during the update leaves the old data intact (Rule 3). If a
host's CPUs run the model, device memory is host memory, and the bytes of all processes on the host
are added up. Megatron's mixed precision corresponds to placement `zero1` with gradient_bytes = 4: 2
+ 4 bytes per parameter on each device, and 12 bytes per parameter that are divided among the
data-parallel ranks (Rajbhandari et al., 2020, section 5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Plan
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.options.budgets import DEVICE_SLOTS
from roadtrain.stages.protocol.pipeline import PipelineShape
from roadtrain.units import show_bytes

USABLE = 0.9  # fraction of a host's memory that plans may use; the rest is for the operating system
# the largest tensor of a block as a fraction of the block: its gradient is on the device until it
# is sent
LARGEST = 1 / 3


@dataclass(frozen=True)
class Need:
    """The bytes that a plan needs of one memory. `where`: the name of the memory. `nbytes`: the
    bytes that the plan needs. `room`: the bytes of the memory that plans may use. `share`: `room`
    divided by all bytes of the memory."""

    where: str
    nbytes: float
    room: float
    share: float = 1.0

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.room

    @property
    def lacking(self) -> float:
        """The number of bytes by which the memory is too small for the plan."""
        return (self.nbytes - self.room) / self.share


def device_bytes(plan: Plan, blocks: Sequence[BlockShape]) -> float:
    """Return the bytes of parameters, gradients and state that a device holds throughout a step.

    With `plan.memory.device_gradients`, these are the buffers of `options.budgets.derive_device`.
    """
    place, parallelism = plan.placement, plan.parallelism
    spread = [block.tables * (1 - 1 / parallelism.replicas) for block in blocks]
    params = [
        (block.params - less - block.experts * (1 - 1 / parallelism.ep)) / parallelism.tp
        for block, less in zip(blocks, spread)
    ]
    total, biggest = sum(params), max(params, default=0.0)
    split = sum(block.params - less for block, less in zip(blocks, spread))
    split = split / parallelism.tp / parallelism.replicas
    if place.streamed:
        every = not plan.memory.root
        layers = [n for n, block in zip(params, blocks) if "." in block.name or every] or params
        biggest = max(layers)
        slots, stays = min(max(2, plan.memory.slots), len(layers)), total - sum(layers)
        gradients = biggest if place.parameters == "split" else LARGEST * biggest
        if plan.memory.device_gradients:
            slots = min(DEVICE_SLOTS, max(2, plan.memory.slots))
            gradients = plan.memory.device_gradients * biggest + stays
        parameters = slots * biggest + stays
    else:
        parameters = gradients = total
    if place.parameters == "split":
        parameters, gradients = parameters + split, gradients + split
    state = {"device": total, "split": split}.get(place.state, 0.0) * plan.sizes.state_bytes
    return parameters * plan.sizes.parameter_bytes + gradients * plan.sizes.gradient_bytes + state


def saved_bytes(plan: Plan, blocks: Sequence[BlockShape], parts: int = 1) -> float:
    """Return the bytes of activations that a micro-batch keeps on a device until the backward.
    `parts`: the number of virtual pipeline stages to which `blocks` belong."""
    if plan.memory.offload:
        return 0.0
    nbytes = sum(_kept(plan, block) for block in blocks)
    if plan.framework.outputs and plan.parallelism.pp > 1:
        nbytes += parts * _on_rank(plan, blocks[-1].input, blocks[-1].input)
    return nbytes * plan.micro_batch / plan.parallelism.cp


def _kept(plan: Plan, block: BlockShape) -> float:
    """Return the bytes per sample of a block's activations that one tensor-parallel rank keeps
    until the backward."""
    inputs = _on_rank(plan, block.input, block.input)
    saved, selective = _on_rank(plan, block.saved, block.whole), plan.framework.selective
    if plan.activation_checkpointing:
        return inputs
    if block.attention and block.products and selective == "products":
        return _on_rank(plan, block.products, block.input)
    return (inputs + saved) / 2 if block.attention and selective == "layers" else saved


def _on_rank(plan: Plan, nbytes: float, whole: float) -> float:
    """Return the bytes of a block's activations on one tensor-parallel rank, if the block has
    `nbytes` bytes in total. Every rank holds `whole` of these bytes, unless sequence parallelism
    divides all bytes."""
    whole = 0.0 if plan.framework.sequence else whole
    return (nbytes - whole) / plan.parallelism.tp + whole


def working_bytes(plan: Plan, blocks: Sequence[BlockShape]) -> float:
    """Return the bytes that blocks need temporarily while they run, besides the activations that
    are kept for backward."""
    tp, framework = plan.parallelism.tp, plan.framework
    split = (block.input - _on_rank(plan, block.input, block.input) for block in blocks)
    inputs, own = max(split, default=0.0), 0.0
    if plan.activation_checkpointing or framework.selective:
        own = max((_on_rank(plan, block.saved, block.whole) for block in blocks), default=0.0)
    logits = sum(block.logits for block in blocks) / tp * framework.logit_bytes
    output = sum(block.params for block in blocks if block.logits) / tp * framework.output_bytes
    return (max(own, logits) + inputs) * plan.micro_batch / plan.parallelism.cp + output


def host_bytes(plan: Plan, blocks: Sequence[BlockShape], ranks: int) -> float:
    """Return the bytes of host memory that a stage needs on one host. `ranks`: the number of the
    stage's data-parallel ranks on this host."""
    place, parallelism = plan.placement, plan.parallelism
    total = sum(block.params for block in blocks)
    own = ranks / parallelism.replicas
    nbytes = plan.sizes.host_bytes * own * total
    if place.parameters == "host":
        nbytes += plan.memory.public * own * total * plan.sizes.parameter_bytes
    if place.gradients == "memory" and place.state == "ssd" and plan.update_at == "step":
        # gradients are held until the last gradient of the step arrives
        nbytes += own * total * plan.sizes.gradient_bytes
    if place.state == "ssd":
        both = plan.sizes.state_bytes + plan.sizes.parameter_bytes
        nbytes += plan.memory.resident * own * total * both
    if place.state == "host":
        nbytes += own * total * (plan.sizes.state_bytes + plan.sizes.held_bytes)
    if plan.memory.kept:
        largest = sorted(block.params for block in blocks)[-plan.memory.kept :]
        nbytes += sum(largest) * plan.sizes.parameter_bytes
    if plan.memory.offload:
        nbytes += sum(block.input for block in blocks) * plan.micro_batch * ranks
    return nbytes


def file_bytes(plan: Plan, params: float) -> float:
    """Return the bytes of the files for `params` parameters."""
    place = plan.placement
    copy = plan.sizes.parameter_bytes if place.parameters in ("ssd", "server") else 0.0
    return params * (
        plan.memory.file_slots * (plan.sizes.state_bytes + copy)
        + plan.sizes.held_bytes * (place.gradients == "ssd")
    )


def stage_bytes(plan: Plan, blocks: Sequence[BlockShape], number: int) -> float:
    """Return the most bytes that a step needs at any time on a device of pipeline stage
    `number`."""
    parallelism = plan.parallelism
    widths = parallelism.widths or (1,) * parallelism.pp
    virtual = parallelism.virtual_stages
    held = PipelineShape(number, 0, widths, virtual, plan.num_microbatches).ahead / virtual
    plan = plan.of_stage(number)
    saved = held * saved_bytes(plan, blocks, virtual)
    nbytes = device_bytes(plan, blocks) + saved + working_bytes(plan, blocks)
    return nbytes * plan.framework.fragmentation + plan.framework.context_bytes


def needs(
    plan: Plan,
    cluster: Cluster,
    cuts: Sequence[Sequence[BlockShape]],
    hosts: Sequence[Host],
    sharing: Sequence[int] = (),
) -> list[Need]:
    """Return the bytes that the plan needs of the devices, hosts and SSDs of each stage, and of the
    server. `hosts`: for each stage, its host with the least resources. `sharing`: for each stage,
    the number of stages on the same host; empty if no stages share a host."""
    out: list[Need] = []
    free, served = 1 - plan.headroom, 0

    def need(where: str, nbytes: float, memory: float, share: float) -> None:
        out.append(Need(where, nbytes, memory * share, share))

    for number, (blocks, host, many) in enumerate(zip(cuts, hosts, sharing or [1] * len(cuts))):
        assert host.device is not None
        need(f"stage {number} device", stage_bytes(plan, blocks, number), host.device.memory, free)
        own = plan.of_stage(number)
        parallelism, place, params = own.parallelism, own.placement, sum(b.params for b in blocks)
        served += params if place.served else 0
        ranks = max(1, min(host.devices // parallelism.tp, parallelism.replicas))
        if not host.device.is_host:
            nbytes, share = host_bytes(own, blocks, ranks), USABLE * free / many
            need(f"stage {number} memory", nbytes, host.memory, share)
        if place.state == "ssd":
            nbytes = file_bytes(own, params) * (ranks / parallelism.replicas)
            need(f"stage {number} SSDs", nbytes, _room(host), 1 / many)
    if served and cluster.spares:
        server = cluster.spares[0].combined
        if server.ssds:
            serving = next(p for p in map(plan.of_stage, range(len(cuts))) if p.placement.served)
            out.append(Need("server SSDs", file_bytes(serving, served), _room(server)))
        else:
            sizes = plan.sizes
            nbytes = served * (sizes.state_bytes + sizes.parameter_bytes + sizes.held_bytes)
            need("server memory", nbytes, server.memory, USABLE * free)
    return out


def shared_needs(
    plan: Plan,
    cuts: Sequence[Sequence[BlockShape]],
    hosts: Sequence[Host],
    slots_of: Sequence[Sequence[int]],
) -> list[Need]:
    """Return the bytes that the plan needs in the memory of hosts whose CPUs run the model: for
    each kind of host, the bytes of the fullest host.

    Args:
        cuts: For each stage, its blocks.
        hosts: Every host with devices.
        slots_of: For each stage, a sequence with one number per device: the index in `hosts` of the
            device's host.
    """
    used: dict[int, float] = {}
    for number, (blocks, slots) in enumerate(zip(cuts, slots_of, strict=True)):
        own = plan.of_stage(number)
        device = stage_bytes(plan, blocks, number)
        for slot, devices in Counter(slots).items():
            ranks = max(1, devices // own.parallelism.tp)
            both = devices * device + host_bytes(own, blocks, ranks)
            used[slot] = used.get(slot, 0.0) + both
    out: dict[str, Need] = {}
    share = USABLE * (1 - plan.headroom)
    for slot, nbytes in sorted(used.items(), key=lambda pair: pair[1]):
        host = hosts[slot]
        if host.device is not None and host.device.is_host:
            where = f"host {host.name}, whose processes share its memory"
            out[host.name] = Need(where, nbytes, host.memory * share, share)
    return [*out.values()]


def _room(host: Host) -> float:
    return sum(ssd.count * ssd.capacity for ssd in host.ssds)


def check(found: Sequence[Need], plan: Plan) -> None:
    """Raise BudgetError if the plan does not fit. The error has the needed bytes, the available
    bytes, and the change of the plan that helps most."""
    worst = max(found, key=lambda need: need.nbytes / max(need.room, 1.0))
    if worst.fits:
        return
    if worst.where.endswith("device") or worst.where.startswith("host"):
        hint = "use more tensor or pipeline ranks, or a placement that streams parameters"
        hint = hint if plan.activation_checkpointing else "use activation_checkpointing"
        hint = "use a smaller micro_batch" if plan.micro_batch > 1 else hint
    else:
        hint = "use a placement that keeps its state elsewhere, or more hosts"
    if not worst.where.endswith("device"):
        hint = f"provide {show_bytes(worst.lacking)} more there; or {hint}"
    kept = f" ({kept_free(plan)})" if plan.headroom and not worst.where.endswith("SSDs") else ""
    raise BudgetError(
        f"{worst.where}: the plan needs {show_bytes(worst.nbytes)},"
        f" but {show_bytes(worst.room)} is available" + kept,
        hint=hint,
    )


def kept_free(plan: Plan) -> str:
    """Return a text for error messages on the fractions of memory that plans must leave free."""
    return (
        f"{plan.headroom:.0%} of device and host memory is kept free, and {1 - USABLE:.0%} of host"
        " memory is the system's"
    )


def cut(blocks: Sequence[BlockShape], plan: Plan) -> list[list[list[BlockShape]]]:
    """Divide the blocks among the pipeline stages, and return the blocks of each stage's virtual
    stages. Blocks before the first layer belong to the first virtual stage of the model, blocks
    after the last layer to the last. Raises ConfigError if the layers cannot be divided."""
    pp = plan.parallelism.pp
    if pp * plan.parallelism.virtual_stages == 1:
        return [[list(blocks)]]
    layers = [i for i, block in enumerate(blocks) if "." in block.name]
    if not layers:
        raise ConfigError("the model has no layers to divide into stages", hint="use pp = 1")
    counts, at, edges = plan.parallelism.layers(len(layers)), 0, (*layers, layers[-1] + 1)
    out: list[list[list[BlockShape]]] = [[] for _ in range(pp)]
    for i, n in enumerate(counts):
        begin = 0 if i == 0 else edges[at]
        at += n
        stop = len(blocks) if i == len(counts) - 1 else edges[at]
        out[i % pp].append(list(blocks[begin:stop]))
    return out
