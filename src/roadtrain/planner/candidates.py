"""Which plans are tried on a cluster: placements x parallelisms x batches x options x stage sizes.

Lossy or late options are candidates only where they are asked for (Rule 2). Pure. Does NOT know
which is good.
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

MOST_PP, MOST_PARTS = 64, (2, 4)
# samples of a micro-batch that are tried: of sequences; of images and rows, which are one token
MOST_MICRO_BATCH, MOST_ROWS = 64, 4096
# micro-batches a step that are tried without a batch; of a pipeline so many a stage
MOST_MICROBATCHES, MOST_TURNS = 64, 16
LONG = 4096  # tokens of a sequence that a context-parallel rank has at least
MOST_APART = 16  # devices of clusters on which stages of unequal width are tried
EVERY = 1000  # slots: each block keeps its own from forward to backward
LeftOut = Callable[[str, str, int], None]  # called with a placement, why, and how many it loses


# Arrangements that are not tried, most often because one number does not divide by another: why,
# with a `{}` for the numbers, so that many arrangements make one reason -> the numbers
Undivided = defaultdict[str, Counter[int]]


def _reasons(undivided: Undivided, batch: int | None) -> Iterator[tuple[str, int]]:
    """Each reason, with the nearest batches that would do, and how many it leaves out."""
    for why, numbers in undivided.items():
        said = why.format(", ".join(map(str, sorted(numbers))))
        if batch is not None and why.startswith("batch"):
            said += f"; {nearest_batches(batch, math.lcm(*numbers))} would"
        yield said, numbers.total()


def nearest_batches(batch: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `batch`."""
    below = batch // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def most_samples(model: ModelShape) -> int:
    """Samples of the largest micro-batch that is tried."""
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
    """Yield every plan on all devices of the cluster.

    Recompute follows where a plan without does not fit (`search`).

    Args:
        left_out: Called with each reason why arrangements of a placement are not tried.
    """
    total, inside = cluster.device_count, min(host.devices for host in cluster.workers)
    most = most_samples(model)
    for name in placements or PLACEMENTS:
        one, undivided = placement(name), Undivided(Counter)
        for parallelism in parallelisms(cluster, model, total, inside, one, undivided):
            ways = list(batches(parallelism, batch, most))
            if not ways and batch is not None:
                _no_way(parallelism, batch, undivided)
            for micro_batch, num_microbatches in ways:
                plan = Plan(one, parallelism, micro_batch, num_microbatches, headroom=headroom)
                plan = plan.changed(window=window_for(cluster))
                yield from _choices(plan, late)
        for why, many in _reasons(undivided, batch):
            left_out(name, why, many)


def _no_way(parallelism: Parallelism, batch: int, undivided: Undivided) -> None:
    """Why no micro-batches of this parallelism make the batch."""
    if parallelism.widths:
        widest = max(parallelism.widths)
        few = "a batch of fewer samples than the {} replicas of the widest stage"
        many = "a batch of more micro-batches than are tried with {} replicas in the widest stage"
        undivided[few if batch < widest else many][widest] += 1
    elif parallelism.virtual_stages > 1 and batch % parallelism.dp == 0:
        why = f"batch {batch} does not divide by {{}} data-parallel ranks x interleaved stages"
        undivided[why][parallelism.dp * parallelism.pp] += 1
    else:
        why = f"batch {batch} does not divide by {{}} data-parallel ranks"
        undivided[why][parallelism.dp] += 1


def window_for(cluster: Cluster) -> int:
    """Packets under way that every switch has slots for; WINDOW where they have more."""
    slots = [switch.slots for switch in cluster.switches if switch.sums and switch.slots]
    most = min([WINDOW, *slots])
    return max(WINDOWS[0], 1 << (most.bit_length() - 1))


def _choices(plan: Plan, late: bool) -> Iterator[Plan]:
    """What its placement may choose, with and without activation checkpointing; `late`: also with
    staleness 1."""
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
    one: Placement,
    undivided: Undivided,
) -> Iterator[Parallelism]:
    """Of `total` devices, `inside` of them on the smallest host."""
    experts = max((block.matrices for block in model.blocks if block.experts), default=1)
    # what has a device's experts, and its part of a sequence
    spread = one.parameters in ("device", "split")
    splits = list(_splits(model, total, inside, one, undivided))
    for tp, pp in splits:
        ranks = total // tp // pp
        stages = _balanced(cluster, model, Parallelism(ranks, tp, pp))
        for cp, ep in product(_powers(model.tokens // LONG), _powers(experts)):
            if not spread and cp * ep > 1:
                continue
            if ranks % cp or ranks % ep:
                undivided["replicas do not divide by {} context or expert ranks"][max(cp, ep)] += 1
                continue
            yield Parallelism(ranks // cp, tp, pp, stages, cp, ep)
            for virtual_stages in MOST_PARTS if pp > 1 else ():
                if model.layers % (pp * virtual_stages) == 0:
                    yield Parallelism(ranks // cp, tp, pp, (), cp, ep, virtual_stages)
                else:
                    why = f"{model.layers} layers do not divide by {{}} interleaved stages"
                    undivided[why][pp * virtual_stages] += 1
    tensor = dict.fromkeys(tp for tp, _ in splits)
    for parallelism in () if one.streamed else _unequal(cluster, model, tensor, undivided):
        yield replace(parallelism, stages=_balanced(cluster, model, parallelism))


def _unequal(
    cluster: Cluster, model: ModelShape, tensor: Iterable[int], undivided: Undivided
) -> Iterator[Parallelism]:
    """Stages of unequal width, each among hosts whose fastest cards meet, where not all do."""
    hosts = [
        (f"{host.name} {n}", cluster.switch_of(max(host.nics, key=lambda nic: nic.total)), devices)
        for host in cluster.workers
        if host.nics
        for n, devices in enumerate([host.devices] * host.count)
    ]
    if len({where for _, where, _ in hosts}) < 2:
        return
    if cluster.device_count > MOST_APART:
        why = f"stages of unequal width are tried on at most {MOST_APART} devices, there are {{}}"
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
    model: ModelShape, total: int, inside: int, one: Placement, undivided: Undivided
) -> Iterator[tuple[int, int]]:
    """Tensor-parallel ranks and pipeline stages: neither where blocks are streamed."""
    for tp in (n for n in _powers(inside) if inside % n == 0):
        if tp > 1 and (one.streamed or not model.heads):
            continue
        if tp > 1 and model.heads % tp:
            undivided[f"{model.heads} heads do not divide by {{}} tensor-parallel ranks"][tp] += 1
            continue
        divisors = [pp for pp in range(1, total // tp + 1) if total // tp % pp == 0]
        for pp in divisors[:1] if one.streamed else divisors:
            if pp <= min(MOST_PP, max(1, model.layers)):
                yield tp, pp
            else:
                why = f"{{}} pipeline stages are more than the model's {model.layers} layers"
                above = f"at most {MOST_PP} pipeline stages are tried, not {{}}"
                undivided[above if pp > MOST_PP else why][pp] += 1


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    return (1 << i for i in range(max(1, most).bit_length()))


def _ends(model: ModelShape) -> tuple[list[int], tuple[float, float]]:
    """Which blocks are layers, and the FLOPs of what comes before them and after."""
    layers = [i for i, block in enumerate(model.blocks) if "." in block.name]
    first, last = (layers[0], layers[-1]) if layers else (0, -1)
    before = sum(block.flops for block in model.blocks[:first])
    return layers, (before, sum(block.flops for block in model.blocks[last + 1 :]))


def _balanced(cluster: Cluster, model: ModelShape, parallelism: Parallelism) -> tuple[int, ...]:
    """Layers of each stage by its slowest device's speed; () where even ones are as fast."""
    pp, first = parallelism.pp, parallelism.first_ranks
    flops = [
        host.device.flops
        for host in cluster.workers
        for _ in range(host.count * host.devices)
        if host.device
    ]
    slowest = [min(flops[begin:stop]) for begin, stop in itertools.pairwise(first)]
    speeds = _of_widths(parallelism, slowest)
    if pp == 1:
        return ()
    layers, ends = _ends(model)
    stages = balanced([model.blocks[i].flops for i in layers], speeds, ends=ends)
    return () if stages is None or stages == even(len(layers), pp) else stages


def _of_widths(parallelism: Parallelism, speeds: Sequence[float]) -> list[float]:
    """Of each stage, all its replicas together; as they are where all have as many."""
    widths = parallelism.widths or (1,) * parallelism.pp
    return [speed * width for speed, width in zip(speeds, widths, strict=True)]


def stages_that_fit(scene: Scene) -> tuple[int, ...] | None:
    """Of a pipeline that fits no device memory as it is: other stages, the fastest that do."""
    plan, blocks = scene.plan, scene.model.blocks
    layers, ends = _ends(scene.model)
    device = [need for need in scene.needs if need.where.endswith("device")]
    plain = plan.parallelism.virtual_stages == 1 < plan.parallelism.pp
    if not plain or sum(n.nbytes - n.room for n in device) > 0:
        return None

    params = [0, *itertools.accumulate(blocks[i].params for i in layers)]
    known: dict[Any, bool] = {}  # stages of as many of the same layers are alike

    def fits(stage: int, begin: int, stop: int) -> bool:
        first = 0 if begin == 0 else layers[begin]
        last = len(blocks) if stop == len(layers) else layers[stop]
        key = stage, last - first, params[stop] - params[begin], first == 0, stop == len(layers)
        if key not in known:
            known[key] = stage_bytes(plan, blocks[first:last], stage) <= device[stage].room
        return known[key]

    slowest = [min(host.device.flops for host in group if host.device) for group in scene.groups_of]
    speeds = _of_widths(plan.parallelism, slowest)
    return balanced([blocks[i].flops for i in layers], speeds, ends=ends, fits=fits)


def batches(
    parallelism: Parallelism, batch: int | None, most_samples: int
) -> Iterator[tuple[int, int]]:
    """(micro-batch, passes) whose product is the batch; without one, the most passes that are
    tried: a sample takes least where what a step takes besides is shared by many."""
    widest = max(parallelism.widths, default=1)  # unequal ones share all micro-batches
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
    """What else a placement may choose, exactly."""
    place = plan.placement
    if place.sum == "relay":
        yield plan.changed(kept=1000)
        yield plan
    elif place.state in ("ssd", "server"):
        for slots in (EVERY, plan.memory.slots) if place.sum == "server" else (plan.memory.slots,):
            yield plan.changed(buffers=8, slots=slots, update_at="step")
            if place.gradients == "memory":
                yield plan.changed(buffers=8, slots=slots, update_at="gradient")
    elif place.name == "zero1":  # as jobs with [parallelism] are run
        yield plan.changed(gradient_bytes=4, gather="forward")
    else:
        yield plan
