"""Which plan is best on a cluster, and why. Candidates are placements x layouts x batches x options
x stage sizes.

Each is first refused where a memory is too small, then bounded from below in closed form (each
resource's bytes over its capacity; nothing waits), and simulated in the order of the bounds until
no bound is better than the best simulated one: so the pick is the best of all candidates by the
simulator, though few are simulated. Lossy or late options are candidates only where they are asked
for (Rule 2). Where no batch is given, many micro-batches a step say how fast a sample can be at
best, and the least batch that comes close to that is planned for. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any

from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.models import ModelShape
from roadtrain.config.parallelism import Parallelism, balanced, even
from roadtrain.config.plan import HEADROOM, PLACEMENTS, Placement, Plan
from roadtrain.errors import ConfigError
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.engine import Engine
from roadtrain.simulator.memory import Need, stage_bytes
from roadtrain.simulator.run import Result, Scene, simulate

# bound of a sample, number, the plan; whether all is in the bound
Waiting = tuple[float, int, Scene, bool]
GOALS = ("time", "cost", "energy")
MOST_PP, MOST_MICRO_BATCH, MOST_PARTS = 64, 64, (2, 4)
# micro-batches a step that are tried without a batch; of a pipeline so many a stage
MOST_MICROS, MOST_TURNS = 64, 16
CLOSE = 0.05  # what a larger batch would have to take off a sample's score to be chosen
LONG = 4096  # tokens of a sequence that a context-parallel rank has at least
EVERY = 1000  # slots: each block keeps its own from forward to backward
SMALLER, MORE = 0.5, 1.1  # a resource's rate, to see what it would change
LITTLE = 1e-3  # share of a step in which a resource is taken, that no rate of it changes anything
ENDS = {
    "network": (" out", " in", " forth", " back"),
    "PCIe": ("to device", "from device"),
    "SSDs": ("read", "write", "mixed"),
    "device links": ("fabric",),
    "host updates": ("updates", "processors"),
    "host sums": ("sums",),
    "host memory": (" memory",),
    "SSD uplink": ("uplink in", "uplink out"),
}  # of the names of what is scaled


@dataclass(frozen=True)
class Found:
    """A plan that was simulated. `score`: seconds, currency or joules a sample."""

    plan: Plan
    result: Result
    score: float


@dataclass
class Family:
    """Candidates of one placement. `refused`: why none of some can be (reason -> how many).
    `nearest`: of those that do not fit a memory, the need that is nearest to its room. `pruned`:
    whose bound was worse than the pick.
    """

    placement: str
    tried: int = 0
    simulated: int = 0
    pruned: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    nearest: tuple[Need, Plan] | None = None
    best: Found | None = None
    least: float = float("inf")  # bound of the best candidate, a sample

    def refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1


@dataclass(frozen=True)
class SearchResult:
    """`front`: simulated plans that no other beats in both time and (cost, else energy)."""

    pick: Found | None
    runner_up: Found | None
    families: dict[str, Family]
    front: list[Found]
    gains: dict[str, float]  # resource -> what MORE of it takes off the pick's score, a share
    flips: list[str]  # where the runner-up would win
    batch: int = 0  # samples of a step that all of it is for; 0: nothing fits, and none was given
    chosen: str = ""  # why, where nobody gave it


def search(
    cluster: Cluster,
    model: ModelShape,
    constants: Constants,
    *,
    goal: str = "time",
    batch: int | None = None,
    placements: Sequence[str] = (),
    late: bool = False,
    explain: bool = True,
    headroom: float = HEADROOM,
) -> SearchResult:
    """`batch`: samples of a step; None: the least whose score a sample is within CLOSE of the
    best there is, by any number of micro-batches. `late`: also staleness 1. `headroom`: the
    share of each device's and host's memory that plans leave free. Raises ConfigError for bad
    input; where nothing fits the answer has no pick, and its families say what is lacking."""
    if batch is not None and batch < 1:
        raise ConfigError(f"a batch of {batch} samples", hint="--batch of 1 or more, or none")
    if not 0 <= headroom < 1:
        raise ConfigError(f"headroom {headroom}", hint="a share of memory: 0 or more, below 1")
    if goal not in GOALS:
        raise ConfigError(f"goal {goal!r}", hint=f"known are {', '.join(GOALS)}")
    if not cluster.device_count:
        raise ConfigError(
            f"cluster {cluster.name} has no devices", hint="give a host `devices` and a `device`"
        )
    if goal == "cost" and not any(
        (*(host.price_per_hour for host in cluster.hosts), cluster.price_per_kwh)
    ):
        raise ConfigError("goal cost, and no host has a price", hint="give hosts `price_per_hour`")
    if goal == "energy" and not any(h.device and h.device.peak_watts for h in cluster.workers):
        raise ConfigError(
            "goal energy, and no device says what it takes", hint="give devices `peak_watts`"
        )
    one = _Search(cluster, model, constants, goal, placements, late, headroom)
    if batch is not None:
        return replace(one.best(batch, explain), batch=batch)
    most = one.best(None, explain=False)
    if most.pick is None:
        return most
    batch, score = one.least_batch(most.pick)
    why = (
        f"no batch was given; of micro-batches of 1 to {MOST_MICRO_BATCH} samples and up to"
        f" {MOST_MICROS} of them, this is the least that is within {CLOSE:.0%} of the best {goal} a"
        " sample"
    )
    if batch < most.pick.plan.samples:
        why += (
            f" ({most.pick.plan.samples} samples take {max(0.0, 1 - most.pick.score / score):.1%}"
            " less)"
        )
    else:
        why += "; it is the most that was tried"
    return replace(one.best(batch, explain), batch=batch, chosen=why)


@dataclass(frozen=True)
class _Search:
    """What is searched for, as in `search`."""

    cluster: Cluster
    model: ModelShape
    constants: Constants
    goal: str
    placements: Sequence[str]
    late: bool
    headroom: float

    def best(self, batch: int | None, explain: bool) -> SearchResult:
        return _best(
            self.cluster,
            self.model,
            self.constants,
            self.goal,
            batch,
            self.placements,
            self.late,
            explain,
            self.headroom,
        )

    def least_batch(self, best: Found) -> tuple[int, float]:
        """Samples of the least step, and its score, by which the best plan's way is within
        CLOSE of its score."""
        ways = []
        size = 1
        while size <= MOST_MICRO_BATCH:
            turn = best.plan.parallelism.pp if best.plan.parallelism.vp > 1 else 1
            ways += [
                (size * micros, size, micros)
                for micros in (turn << i for i in range(MOST_MICROS.bit_length()))
            ]
            size *= 2
        for _, size, micros in sorted(ways, key=lambda way: (way[0], -way[1])):
            plan = best.plan.changed(micro_batch=size, micros=micros)
            if plan.samples >= best.plan.samples:
                break
            scene = Scene(plan, self.cluster, self.model, self.constants)
            if not all(need.fits for need in scene.needs):
                continue
            scene.build(Engine())
            most = best.score * (1 + CLOSE)
            if _score(self.goal, scene.bound()[0], plan, scene) > most:
                continue
            found = _simulated(plan, self.cluster, self.model, self.constants, self.goal)
            if found.score <= most:
                return plan.samples, found.score
        return best.plan.samples, best.score


def _best(
    cluster: Cluster,
    model: ModelShape,
    constants: Constants,
    goal: str,
    batch: int | None,
    placements: Sequence[str],
    late: bool,
    explain: bool,
    headroom: float,
) -> SearchResult:
    """Of all candidates of one batch."""
    families: dict[str, Family] = {}
    fits: set[Plan] = set()
    waiting: list[Waiting] = []
    passes: dict[Any, float] = {}  # what tells them apart -> seconds of a micro-batch, both ways
    for plan in candidates(
        cluster, model, batch=batch, placements=placements, late=late, headroom=headroom
    ):
        if plan.recompute and plan.changed(recompute=False) in fits:
            continue  # it would only compute more
        family = families.setdefault(plan.placement.name, Family(plan.placement.name))
        family.tried += 1
        try:
            scene = Scene(plan, cluster, model, constants)
        except ConfigError as error:
            family.refuse(str(error).splitlines()[0])
            continue
        worst = max(scene.needs, key=_over)
        if not worst.fits and (stages := _that_fit(scene)) is not None:
            plan = plan.changed(parallelism=replace(plan.parallelism, stages=stages))
            scene = Scene(plan, cluster, model, constants)
            worst = max(scene.needs, key=_over)
        if not worst.fits:
            family.refuse("memory of " + worst.where.replace("stage ", "").lstrip("0123456789 "))
            if family.nearest is None or _over(worst) < _over(family.nearest[0]):
                family.nearest = worst, plan
            continue
        fits.add(plan)
        key = (
            plan.micro_batch,
            plan.recompute,
            plan.parallelism.tp,
            plan.parallelism.cp,
            plan.parallelism.ep,
        )
        if key not in passes:
            passes[key] = _computing(plan, cluster, model, constants)
        least = 0.0 if goal == "energy" else _score(goal, passes[key] * _turns(plan), plan, scene)
        waiting.append((least, len(waiting), scene, False))
    if not families:
        raise ConfigError(
            f"no parallelism of {cluster.device_count} devices takes a batch of {batch} samples",
            hint=(
                "a multiple of the data-parallel ranks: "
                f"{-(-(batch or 1) // cluster.device_count) * cluster.device_count} is one"
            ),
        )
    found: list[Found] = []
    best, order = float("inf"), _in_order(waiting, goal, families)
    for least, plan in order:
        if least >= best:
            waiting.append((least, -1, Scene(plan, cluster, model, constants), True))
            break
        one = _simulated(plan, cluster, model, constants, goal)
        families[plan.placement.name].simulated += 1
        found.append(one)
        best = min(best, one.score)
    for least, _, scene, _ in waiting:
        family = families[scene.plan.placement.name]
        family.pruned, family.least = family.pruned + 1, min(family.least, least)
    found.sort(key=lambda one: one.score)
    for one in reversed(found):
        families[one.plan.placement.name].best = one
    if not found:
        return SearchResult(None, None, families, [], {}, [])
    pick = found[0]
    runner = next((one for one in found[1:] if _differs(one.plan, pick.plan)), None)
    if runner is None:  # it is pruned, so its bound alone says that it lost
        runner = next(
            (
                _simulated(plan, cluster, model, constants, goal)
                for _, plan in _in_order(waiting, goal, families)
                if _differs(plan, pick.plan)
            ),
            None,
        )
    if runner is not None:
        families[runner.plan.placement.name].best = (
            families[runner.plan.placement.name].best or runner
        )
    gains = _gains(pick, cluster, model, constants, goal) if explain else {}
    flips = (
        _flips(pick, runner, cluster, model, constants, goal)
        if explain and runner is not None
        else []
    )
    return SearchResult(
        pick, runner, families, _front([*found, *([runner] if runner else [])]), gains, flips
    )


def _computing(plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants) -> float:
    """Seconds that one micro-batch takes at least, both ways, on the fastest device."""
    split, last = plan.parallelism.tp * plan.parallelism.cp, len(model.blocks) - 1
    return min(
        sum(
            constants.forward(
                block,
                plan.micro_batch,
                split,
                host.device,
                plan.precision,
                plan.parallelism.ep,
                plan.passes,
            )
            * (3 + (plan.recompute and i < last))
            for i, block in enumerate(model.blocks)
        )
        for host in cluster.workers
        if host.device
    )


def _turns(plan: Plan) -> float:
    """How many micro-batches' passes of the whole model a step of a pipeline takes at least: stage
    s begins when the first has come through all before it, so it is (1 - 1 / micros) as long as the
    one before, at best.
    """
    n = plan.micros * plan.parallelism.vp
    return 1 / plan.parallelism.vp / (1 - (1 - 1 / n) ** plan.parallelism.pp)


def _in_order(
    waiting: list[Waiting], goal: str, families: Mapping[str, Family]
) -> Iterator[tuple[float, Plan]]:
    """Bounds and plans, the least first. What is bounded by computing alone is built when it
    comes first, since that takes a while."""
    heapify(waiting)
    while waiting:
        least, number, scene, built = heappop(waiting)
        if built:
            yield least, scene.plan
            continue
        try:
            scene.build(Engine())
        except ConfigError as error:
            families[scene.plan.placement.name].refuse(str(error).splitlines()[0])
            continue
        heappush(
            waiting,
            (max(least, _score(goal, scene.bound()[0], scene.plan, scene)), number, scene, True),
        )


def candidates(
    cluster: Cluster,
    model: ModelShape,
    *,
    batch: int | None = None,
    placements: Sequence[str] = (),
    late: bool = False,
    headroom: float = HEADROOM,
) -> Iterator[Plan]:
    """Every plan on all devices of the cluster. Recompute follows where a plan without does not
    fit (`search`)."""
    total, inside = cluster.device_count, min(host.devices for host in cluster.workers)
    for name in placements or PLACEMENTS:
        one = PLACEMENTS.get(name)
        if one is None:
            raise ConfigError(
                f"no placement is called {name!r}", hint=f"known are {', '.join(PLACEMENTS)}"
            )
        for parallelism in parallelisms(cluster, model, total, inside, one):
            for micro_batch, micros in batches(parallelism, batch):
                for recompute in (False, True):
                    plan = Plan(
                        one,
                        parallelism,
                        micro_batch,
                        micros,
                        recompute=recompute,
                        headroom=headroom,
                    )
                    for choice in options(plan):
                        yield choice
                        if late and not choice.placement.streamed:
                            continue
                        if late:
                            yield choice.changed(staleness=1)


def parallelisms(
    cluster: Cluster, model: ModelShape, total: int, inside: int, one: Placement
) -> Iterator[Parallelism]:
    experts = max((block.matrices for block in model.blocks if block.experts), default=1)
    for tp in (n for n in _powers(inside) if inside % n == 0):
        if tp > 1 and (one.streamed or not model.heads or model.heads % tp):
            continue
        for pp in (
            n
            for n in range(1, min(MOST_PP, max(1, model.layers), total // tp) + 1)
            if total // tp % n == 0
        ):
            if pp > 1 and one.streamed:
                continue
            ranks = total // tp // pp
            stages = _balanced(cluster, model, total // pp, pp)
            # what has a device's experts, and its part of a sequence
            spread = one.parameters in ("device", "split")
            for cp in (
                n for n in _powers(model.tokens // LONG) if ranks % n == 0 and (spread or n == 1)
            ):
                for ep in (n for n in _powers(experts) if ranks % n == 0 and (spread or n == 1)):
                    yield Parallelism(ranks // cp, tp, pp, stages, cp, ep)
                    for vp in MOST_PARTS if pp > 1 else ():
                        if model.layers % (pp * vp) == 0:
                            yield Parallelism(ranks // cp, tp, pp, (), cp, ep, vp)


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    return (1 << i for i in range(max(1, most).bit_length()))


def _ends(model: ModelShape) -> tuple[list[int], tuple[float, float]]:
    """Which blocks are layers, and the FLOPs of what comes before them and after."""
    layers = [i for i, block in enumerate(model.blocks) if "." in block.name]
    first, last = (layers[0], layers[-1]) if layers else (0, -1)
    return layers, (
        sum(block.flops for block in model.blocks[:first]),
        sum(b.flops for b in model.blocks[last + 1 :]),
    )


def _balanced(cluster: Cluster, model: ModelShape, per_stage: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage by its slowest device's speed; () where even ones are as fast."""
    flops = [
        host.device.flops
        for host in cluster.workers
        for _ in range(host.count * host.devices)
        if host.device
    ]
    speeds = [min(flops[i * per_stage : (i + 1) * per_stage]) for i in range(pp)]
    layers, ends = _ends(model)
    stages = (
        balanced([model.blocks[i].flops for i in layers], speeds, ends=ends) if pp > 1 else None
    )
    return () if stages is None or stages == even(len(layers), pp) else stages


def _that_fit(scene: Scene) -> tuple[int, ...] | None:
    """Of a pipeline that fits no device memory as it is: other stages, the fastest that do."""
    plan, blocks = scene.plan, scene.model.blocks
    layers, ends = _ends(scene.model)
    device = [need for need in scene.needs if need.where.endswith("device")]
    if (
        plan.parallelism.vp * plan.parallelism.pp == 1
        or plan.parallelism.vp > 1
        or sum(n.nbytes - n.room for n in device) > 0
    ):
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

    speeds = [min(host.device.flops for host in group if host.device) for group in scene.groups_of]
    return balanced([blocks[i].flops for i in layers], speeds, ends=ends, fits=fits)


def batches(parallelism: Parallelism, batch: int | None) -> Iterator[tuple[int, int]]:
    """(micro-batch, passes) whose product is the batch; without one, the most passes that are
    tried: a sample takes least where what a step takes besides is shared by many."""
    size = 1
    while size <= MOST_MICRO_BATCH:
        most = MOST_MICROS if parallelism.pp == 1 else MOST_TURNS * parallelism.pp
        micros = most if batch is None else batch // (parallelism.dp * size)
        if (batch is None or batch % (parallelism.dp * size) == 0) and (
            parallelism.vp == 1 or micros % parallelism.pp == 0
        ):
            yield size, micros
        size *= 2


def options(plan: Plan) -> Iterator[Plan]:
    """What else a placement may choose, exactly."""
    place = plan.placement
    if place.sum == "relay":
        yield plan.changed(kept=1000)
        yield plan
    elif place.state in ("ssd", "server"):
        for slots in (EVERY, plan.slots) if place.sum == "server" else (plan.slots,):
            yield plan.changed(buffers=8, slots=slots, update_at="step")
            if place.gradients == "memory":
                yield plan.changed(buffers=8, slots=slots, update_at="gradient")
    else:
        yield plan


def _over(need: Need) -> float:
    return need.nbytes / max(need.room, 1.0)


def _score(goal: str, seconds: float, plan: Plan, scene: Scene) -> float:
    """Of a sample, at least."""
    if goal == "cost":  # what energy costs comes on top
        return scene.price_per_s() * seconds / plan.samples
    if goal == "energy":
        return scene.watts({}) * seconds / plan.samples
    return seconds / plan.samples


def _simulated(
    plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants, goal: str
) -> Found:
    result = simulate(plan, cluster, model, constants, checked=False)
    worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}[goal]
    return Found(plan, result, worth / plan.samples)


def _differs(one: Plan, other: Plan) -> bool:
    """Whether it is another way, not another batch of the same."""
    return (one.placement, one.parallelism) != (other.placement, other.parallelism)


def _front(found: Sequence[Found]) -> list[Found]:
    def second(one: Found) -> float:
        return (one.result.price or one.result.joules) / one.plan.samples

    out: list[Found] = []
    for one in sorted(found, key=lambda f: (f.result.seconds / f.plan.samples, second(f))):
        if not out or second(one) < second(out[-1]):
            out.append(one)
    return out


def scaled(cluster: Cluster, factor: float) -> dict[str, Cluster]:
    """The cluster with one kind of resource `factor` as fast."""

    def hosts(change: Callable[[Host], dict[str, Any]]) -> Cluster:
        return cluster.model_copy(
            update={"hosts": tuple(h.model_copy(update=change(h)) for h in cluster.hosts)}
        )

    def device(host: Host, name: str) -> dict[str, Any]:
        own = host.device
        return (
            {}
            if own is None
            else {"device": own.model_copy(update={name: getattr(own, name) * factor})}
        )

    def ssds(host: Host) -> dict[str, Any]:
        return {
            "ssds": tuple(
                s.model_copy(
                    update={
                        name: getattr(s, name) * factor
                        for name in ("read", "write", "internal", "updates")
                    }
                )
                for s in host.ssds
            )
        }

    out = {
        "computing": hosts(lambda h: device(h, "flops")),
        "network": hosts(
            lambda h: {
                "nics": tuple(n.model_copy(update={"rate": n.rate * factor}) for n in h.nics)
            }
        ),
        "PCIe": hosts(lambda h: device(h, "copy_rate")),
        "device links": hosts(lambda h: {"fabric": h.fabric * factor}),
        "host updates": hosts(lambda h: {"updates": h.updates * factor}),
        "host sums": hosts(lambda h: {"sums": h.sums * factor}),
        "host memory": hosts(lambda h: {"memory_rate": h.memory_rate * factor}),
    }
    if any(host.ssds for host in cluster.hosts):
        out |= {"SSDs": hosts(ssds), "SSD uplink": hosts(lambda h: {"uplink": h.uplink * factor})}
    return out


def _busy(one: Found, name: str) -> float:
    """The share of a step in which what is called `name` is taken, at most."""
    # some is counted as the device's
    tensor = name == "device links" and one.plan.parallelism.devices > one.plan.parallelism.dp
    if name not in ENDS or tensor:
        return 1.0
    return min(
        1.0, sum(share for what, share in one.result.busy.items() if what.endswith(ENDS[name]))
    )


def _gains(
    pick: Found, cluster: Cluster, model: ModelShape, constants: Constants, goal: str
) -> dict[str, float]:
    gains = {}
    for name, other in scaled(cluster, MORE).items():
        if _busy(pick, name) < LITTLE:
            continue
        gain = 1 - _with(pick, name, other, model, constants, goal) / pick.score
        if gain > 1e-4:
            gains[name] = gain
    return dict(sorted(gains.items(), key=lambda pair: -pair[1]))


def _with(
    one: Found, name: str, other: Cluster, model: ModelShape, constants: Constants, goal: str
) -> float:
    """Its score where what is called `name` is as fast as in `other`: its own if it hardly uses
    that."""
    if _busy(one, name) < LITTLE:
        return one.score
    return _simulated(one.plan, other, model, constants, goal).score


def _flips(
    pick: Found, runner: Found, cluster: Cluster, model: ModelShape, constants: Constants, goal: str
) -> list[str]:
    out = []
    for factor, words in ((SMALLER, "half as fast"), (1 / SMALLER, "twice as fast")):
        for name, other in scaled(cluster, factor).items():
            worse, better = (
                (1 + _busy(pick, name), 1.0) if factor < 1 else (1.0, 1 - _busy(runner, name) / 2)
            )
            if runner.score * better >= pick.score * worse:  # whatever waits for it
                continue
            mine, its = (_with(one, name, other, model, constants, goal) for one in (pick, runner))
            if its < mine * (1 - 1e-3):
                out.append(f"{name} {words}")
    return out


def least_change(answer: SearchResult) -> tuple[Need, Plan] | None:
    """Of all plans that fit nowhere, the need nearest to its room."""
    near = [family.nearest for family in answer.families.values() if family.nearest is not None]
    return min(near, key=lambda pair: _over(pair[0]), default=None)
