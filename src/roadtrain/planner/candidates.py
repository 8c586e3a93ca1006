"""Generate the plans to try on a cluster: all combinations of placements, parallelisms, batches,
options and stage sizes.

Lossy or delayed options are candidates only on request (Rule 2). search.py finds the best plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from roadtrain.config.cluster import Cluster
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import HEADROOM, PLACEMENTS, Placement, Plan, placement
from roadtrain.errors import ConfigError
from roadtrain.simulator.memory import stage_bytes
from roadtrain.simulator.scene import Scene
from roadtrain.stages.host_ranks import suited_parallelisms
from roadtrain.stages.parallelism import Parallelism, balanced, even
from roadtrain.switch.options import WINDOW, WINDOWS

# most pipeline stages, and the numbers of interleaved parts of the model per stage to try
MOST_PP, MOST_PARTS = 64, (2, 4)
# most samples in a micro-batch of sequences, and of images or rows, which have one token each
MOST_MICRO_BATCH, MOST_ROWS = 64, 4096
# most micro-batches per step if no batch is given: without a pipeline, and per pipeline stage
MOST_MICROBATCHES, MOST_TURNS = 64, 16
LONG = 4096  # fewest tokens of a sequence per context-parallel rank
MOST_APART = 16  # most devices for which stages of unequal width are tried
EVERY = 1000  # number of slots with which each block keeps its slot from forward to backward
LeftOut = Callable[[str, str, int], None]  # called with a placement, a reason, and a count


# Arrangements that are not tried, usually because one number does not divide another. The keys are
# reasons with a `{}` for a number, so that many arrangements share a reason; the values count the
# numbers.
Undivided = defaultdict[str, Counter[int]]


def _reasons(undivided: Undivided, batch: int | None) -> Iterator[tuple[str, int]]:
    """Yield pairs: a reason as text, and the number of combinations that are not tried for this
    reason."""
    for why, numbers in undivided.items():
        reason = why.format(", ".join(map(str, sorted(numbers))))
        if batch is not None and why.startswith("batch"):
            reason += f"; {nearest_batches(batch, math.lcm(*numbers))} would be divisible"
        yield reason, numbers.total()


def nearest_batches(batch: int, unit: int) -> str:
    """Return a text with the multiple of `unit` just below `batch` and the multiple just above
    it."""
    below = batch // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def most_samples(model: ModelShape) -> int:
    """Return the largest micro-batch to try, in samples."""
    return MOST_MICRO_BATCH if model.tokens > 1 else MOST_ROWS


def candidates(
    cluster: Cluster,
    model: ModelShape,
    *,
    batch: int | None = None,
    placements: Sequence[str] = (),
    late: bool = False,
    headroom: float = HEADROOM,
    left_out: LeftOut = lambda placement, why, many: None,
) -> Iterator[Plan]:
    """Yield every plan to try. Each plan uses all devices of the cluster.

    Args:
        cluster: The cluster.
        model: The shape of the model.
        batch: The samples of a step. If None, each parallelism is only tried with a single, large
            number of micro-batches.
        placements: The names of the placements to try. If empty, all placements are tried.
        late: If True, also yield plans with staleness 1.
        headroom: The fraction of memory that stays free.
        left_out: Function that is called with the name of a placement, the reason why some
            combinations with this placement are not tried, and the number of these combinations.
    """
    total, inside = cluster.device_count, min(host.devices for host in cluster.workers)
    most = most_samples(model)
    for name in placements or PLACEMENTS:
        place, undivided = placement(name), Undivided(Counter)
        for parallelism in parallelisms(cluster, model, total, inside, place, undivided):
            splits = list(batches(parallelism, batch, most))
            if not splits and batch is not None:
                _note_undivided(parallelism, batch, undivided)
            for micro_batch, num_microbatches in splits:
                plan = Plan(place, parallelism, micro_batch, num_microbatches, headroom=headroom)
                plan = plan.changed(window=window_for(cluster))
                yield from _choices(plan, late)
        for why, many in _reasons(undivided, batch):
            left_out(name, why, many)


def _note_undivided(parallelism: Parallelism, batch: int, undivided: Undivided) -> None:
    """Add the reason why this parallelism cannot divide the batch into micro-batches."""
    if parallelism.widths:
        widest = max(parallelism.widths)
        few = "the batch has fewer samples than the {} replicas of the widest stage"
        many = "the batch needs more micro-batches than are tried with {} replicas in a stage"
        undivided[few if batch < widest else many][widest] += 1
    elif parallelism.virtual_stages > 1 and batch % parallelism.dp == 0:
        why = f"batch {batch} is not divisible by {{}} data-parallel ranks x interleaved stages"
        undivided[why][parallelism.dp * parallelism.pp] += 1
    else:
        why = f"batch {batch} is not divisible by {{}} data-parallel ranks"
        undivided[why][parallelism.dp] += 1


def window_for(cluster: Cluster) -> int:
    """Return the number of packets that may be in flight: the largest power of two up to 2048 and
    up to the number of slots of every switch that sums. The result is at least 8."""
    slots = [switch.slots for switch in cluster.switches if switch.sums and switch.slots]
    most = min([WINDOW, *slots])
    return max(WINDOWS[0], 1 << (most.bit_length() - 1))


def _choices(plan: Plan, late: bool) -> Iterator[Plan]:
    """Yield variants of the plan: each option of the plan's placement, with and without activation
    checkpointing, and with staleness 1 if `late` is True."""
    for again in (False, True):
        for choice in options(plan.changed(activation_checkpointing=again)):
            yield choice
            if late and choice.placement.streamed:
                yield choice.changed(staleness=1)


def parallelisms(
    cluster: Cluster,
    model: ModelShape,
    total: int,
    inside: int,
    place: Placement,
    undivided: Undivided,
) -> Iterator[Parallelism]:
    """Yield the parallelisms to try. Each parallelism uses all devices of the cluster.

    Args:
        cluster: The cluster.
        model: The shape of the model.
        total: The number of devices of the cluster.
        inside: The number of devices of the smallest host.
        place: The placement.
        undivided: A mapping to which the reasons are added why other parallelisms are not tried.
    """
    experts = max((block.matrices for block in model.blocks if block.experts), default=1)
    # placements that can spread experts and parts of a sequence over devices
    spread = place.parameters in ("device", "split")
    splits = list(_splits(model, total, inside, place, undivided))
    for tp, pp in splits:
        ranks = total // tp // pp
        stages = _balanced(cluster, model, Parallelism(ranks, tp, pp))
        for cp, ep in product(_powers(model.tokens // LONG), _powers(experts)):
            if not spread and cp * ep > 1:
                continue
            if ranks % cp or ranks % ep:
                undivided["ranks are not divisible by {} context/expert ranks"][max(cp, ep)] += 1
                continue
            yield Parallelism(ranks // cp, tp, pp, stages, cp, ep)
            for virtual_stages in MOST_PARTS if pp > 1 else ():
                if model.layers % (pp * virtual_stages) == 0:
                    yield Parallelism(ranks // cp, tp, pp, (), cp, ep, virtual_stages)
                else:
                    why = f"{model.layers} layers are not divisible by {{}} interleaved stages"
                    undivided[why][pp * virtual_stages] += 1
    tensor = dict.fromkeys(tp for tp, _ in splits)
    for parallelism in () if place.streamed else _unequal(cluster, model, tensor, undivided):
        yield replace(parallelism, stages=_balanced(cluster, model, parallelism))


def _unequal(
    cluster: Cluster, model: ModelShape, tensor: Iterable[int], undivided: Undivided
) -> Iterator[Parallelism]:
    """Yield parallelisms whose pipeline stages have different numbers of replicas (widths). The
    hosts of a stage share a switch. Yield nothing if all hosts of the cluster share a switch."""
    hosts = [
        (f"{host.name} {n}", cluster.switch_of(max(host.nics, key=lambda nic: nic.total)), devices)
        for host in cluster.workers
        if host.nics
        for n, devices in enumerate([host.devices] * host.count)
    ]
    if len({switch for _, switch, _ in hosts}) < 2:
        return
    if cluster.device_count > MOST_APART:
        why = f"stages of unequal width are tried on at most {MOST_APART} devices, not on {{}}"
        undivided[why][cluster.device_count] += 1
        return
    for tp in tensor:
        try:
            for found in suited_parallelisms(hosts, max(1, model.layers), tp=tp):
                if found.widths and found.devices == cluster.device_count:
                    yield found
        except ConfigError as error:
            first = str(error).partition("\n")[0].replace("{", "{{").replace("}", "}}")
            undivided[f"stages of unequal width, tp {{}}: {first}"][tp] += 1


def _splits(
    model: ModelShape, total: int, inside: int, place: Placement, undivided: Undivided
) -> Iterator[tuple[int, int]]:
    """Yield pairs: the number of tensor-parallel ranks, and the number of pipeline stages. Both are
    1 if the placement streams blocks."""
    for tp in (n for n in _powers(inside) if inside % n == 0):
        if tp > 1 and (place.streamed or not model.heads):
            continue
        if tp > 1 and model.heads % tp:
            undivided[f"{model.heads} heads are no multiple of {{}} tensor-parallel ranks"][tp] += 1
            continue
        divisors = [pp for pp in range(1, total // tp + 1) if total // tp % pp == 0]
        for pp in divisors[:1] if place.streamed else divisors:
            if pp <= min(MOST_PP, max(1, model.layers)):
                yield tp, pp
            else:
                why = f"{{}} pipeline stages are more than the model's {model.layers} layers"
                above = f"at most {MOST_PP} pipeline stages are tried, not {{}}"
                undivided[above if pp > MOST_PP else why][pp] += 1


def _powers(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... up to `most`."""
    return (1 << i for i in range(max(1, most).bit_length()))


def _ends(model: ModelShape) -> tuple[list[int], tuple[float, float]]:
    """Return the index in `model.blocks` of each layer, and two sums of FLOPs: of the blocks before
    the first layer, and of the blocks after the last layer."""
    layers = [i for i, block in enumerate(model.blocks) if "." in block.name]
    first, last = (layers[0], layers[-1]) if layers else (0, -1)
    before = sum(block.flops for block in model.blocks[:first])
    return layers, (before, sum(block.flops for block in model.blocks[last + 1 :]))


def _balanced(cluster: Cluster, model: ModelShape, parallelism: Parallelism) -> tuple[int, ...]:
    """Distribute the layers over the pipeline stages, so that faster stages get more layers. Return
    the number of layers of each stage, or () for an even distribution."""
    pp, first = parallelism.pp, parallelism.first_ranks
    flops = [
        host.device.flops
        for host in cluster.workers
        for _ in range(host.count * host.devices)
        if host.device
    ]
    slowest = [min(flops[begin:stop]) for begin, stop in itertools.pairwise(first)]
    speeds = _stage_speeds(parallelism, slowest)
    if pp == 1:
        return ()
    layers, ends = _ends(model)
    stages = balanced([model.blocks[i].flops for i in layers], speeds, ends=ends)
    return () if stages is None or stages == even(len(layers), pp) else stages


def _stage_speeds(parallelism: Parallelism, speeds: Sequence[float]) -> list[float]:
    """Return the speed of each stage: the speed of a replica of the stage, from `speeds`, times the
    number of replicas. If all stages have equally many replicas, return `speeds`."""
    widths = parallelism.widths or (1,) * parallelism.pp
    return [speed * width for speed, width in zip(speeds, widths, strict=True)]


def stages_that_fit(scene: Scene) -> tuple[int, ...] | None:
    """Return the fastest numbers of layers per stage with which a pipeline fits into device memory,
    or None if no division fits."""
    plan, blocks = scene.plan, scene.model.blocks
    layers, ends = _ends(scene.model)
    device = [need for need in scene.needs if need.where.endswith("device")]
    plain = plan.parallelism.virtual_stages == 1 < plan.parallelism.pp
    if not plain or sum(n.nbytes - n.room for n in device) > 0:
        return None

    params = [0, *itertools.accumulate(blocks[i].params for i in layers)]
    fit: dict[Any, bool] = {}  # cached results, as stages with equal numbers of layers are equal

    def fits(stage: int, begin: int, stop: int) -> bool:
        first = 0 if begin == 0 else layers[begin]
        last = len(blocks) if stop == len(layers) else layers[stop]
        key = stage, last - first, params[stop] - params[begin], first == 0, stop == len(layers)
        if key not in fit:
            fit[key] = stage_bytes(plan, blocks[first:last], stage) <= device[stage].room
        return fit[key]

    slowest = [min(host.device.flops for host in group if host.device) for group in scene.groups_of]
    speeds = _stage_speeds(plan.parallelism, slowest)
    return balanced([blocks[i].flops for i in layers], speeds, ends=ends, fits=fits)


def batches(
    parallelism: Parallelism, batch: int | None, most_samples: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs: the number of samples of a micro-batch, and the number of micro-batches of a
    step. The ranks together train `batch` samples per step. If `batch` is None, all pairs have the
    same large number of micro-batches, with the lowest fixed costs per sample."""
    widest = max(parallelism.widths, default=1)  # replicas of unequal stages share micro-batches
    most = MOST_MICROBATCHES if parallelism.pp == 1 else MOST_TURNS * parallelism.pp * widest
    for size in _powers(most_samples):
        num_microbatches = most if batch is None else batch // (parallelism.dp * size)
        if (
            (batch is None or batch % (parallelism.dp * size) == 0)
            and (parallelism.virtual_stages == 1 or num_microbatches % parallelism.pp == 0)
            and num_microbatches >= widest
            and (num_microbatches <= most or not parallelism.widths)
        ):
            yield size, num_microbatches


def options(plan: Plan) -> Iterator[Plan]:
    """Yield variants of the plan: one for each option of the plan's placement that is not lossy."""
    place = plan.placement
    if place.sum == "relay":
        yield plan.changed(kept=1000)
        yield plan
    elif place.state in ("ssd", "server"):
        for slots in (EVERY, plan.memory.slots) if place.sum == "server" else (plan.memory.slots,):
            yield plan.changed(buffers=8, slots=slots, update_at="step")
            if place.gradients == "memory":
                yield plan.changed(buffers=8, slots=slots, update_at="gradient")
    elif place.name == "zero1":  # as in jobs with [parallelism]
        yield plan.changed(gradient_bytes=4, gather="forward")
    else:
        yield plan
