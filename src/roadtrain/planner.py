"""Which plan is best on a cluster, and why. Candidates are placements x layouts x batches x options x stage sizes.

Each is first refused where a memory is too small, then bounded from below in closed form (each resource's bytes over
its capacity; nothing waits), and simulated in the order of the bounds until no bound is better than the best simulated
one: so the pick is the best of all candidates by the simulator, though few are simulated. Lossy or late options are
candidates only where they are asked for (Rule 2). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.sim.compute import Constants
from roadtrain.sim.engine import Engine
from roadtrain.sim.memory import Need
from roadtrain.sim.run import Result, Scene, simulate
from roadtrain.spec.cluster import Cluster, Host
from roadtrain.spec.layout import Layout, uneven
from roadtrain.spec.placement import PLACEMENTS, Placement, Plan
from roadtrain.spec.shapes import ModelShape

GOALS = ("time", "cost", "energy")
MOST_PP, MOST_MICRO_BATCH = 64, 64
EVERY = 1000  # slots: each block keeps its own from forward to backward
SMALLER, MORE = 0.5, 1.1  # a resource's rate, to see what it would change
ENDS = {"network": (" out", " in", " forth", " back"), "PCIe": ("to device", "from device"), "SSDs": ("read", "write"),
        "device links": ("fabric",), "host updates": ("updates", "processors"), "host sums": ("sums",),
        "host memory": ("memory",), "SSD uplink": ("uplink in", "uplink out")}  # of the names of what is scaled


@dataclass(frozen=True)
class Found:
    """A plan that was simulated. `score`: seconds, currency or joules a sample."""

    plan: Plan
    result: Result
    score: float


@dataclass
class Family:
    """Candidates of one placement. `refused`: why none of some can be (reason -> how many). `nearest`: of those that do
    not fit a memory, the need that is nearest to its room. `pruned`: whose bound was worse than the pick."""

    placement: str
    tried: int = 0
    simulated: int = 0
    pruned: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    nearest: tuple[Need, Plan] | None = None
    best: Found | None = None
    least: float = float("inf")  # bound of the best candidate, a sample


@dataclass(frozen=True)
class Answer:
    """`front`: simulated plans that no other beats in both time and (cost, else energy)."""

    pick: Found | None
    runner_up: Found | None
    families: dict[str, Family]
    front: list[Found]
    gains: dict[str, float]  # resource -> what MORE of it takes off the pick's score, a share
    flips: list[str]  # where the runner-up would win


def search(
    cluster: Cluster, model: ModelShape, constants: Constants, *, goal: str = "time", batch: int | None = None,
    placements: Sequence[str] = (), late: bool = False, explain: bool = True,
) -> Answer:
    """`batch`: samples of a step; None: the best there is. `late`: also staleness 1. Raises ConfigError for bad input;
    where nothing fits the answer has no pick, and its families say what is lacking."""
    if goal not in GOALS:
        raise ConfigError(f"goal {goal!r}", hint=f"known are {', '.join(GOALS)}")
    if not cluster.device_count:
        raise ConfigError(f"cluster {cluster.name} has no devices", hint="give a host `devices` and a `device`")
    if goal == "cost" and not any(host.price_per_hour for host in cluster.hosts):
        raise ConfigError("goal cost, and no host has a price", hint="give hosts `price_per_hour`")
    if goal == "energy" and not any(h.device and h.device.peak_watts for h in cluster.workers):
        raise ConfigError("goal energy, and no device says what it takes", hint="give devices `peak_watts`")
    families: dict[str, Family] = {}
    fits: set[Plan] = set()
    waiting: list[tuple[float, int, Plan]] = []
    for plan in candidates(cluster, model, batch=batch, placements=placements, late=late):
        if plan.recompute and plan.changed(recompute=False) in fits:
            continue  # it would only compute more
        family = families.setdefault(plan.placement.name, Family(plan.placement.name))
        family.tried += 1
        try:
            scene = Scene(Engine(), plan, cluster, model, constants, None, False)
        except ConfigError as error:
            reason = str(error).splitlines()[0]
            family.refused[reason] = family.refused.get(reason, 0) + 1
            continue
        worst = max(scene.needs, key=_over)
        if not worst.fits:
            what = "memory of " + worst.where.replace("stage ", "").lstrip("0123456789 ")
            family.refused[what] = family.refused.get(what, 0) + 1
            if family.nearest is None or _over(worst) < _over(family.nearest[0]):
                family.nearest = worst, plan
            continue
        fits.add(plan)
        seconds, _ = scene.bound()
        least = _score(goal, seconds, plan, scene)
        family.least = min(family.least, least)
        waiting.append((least, len(waiting), plan))
    found: list[Found] = []
    best = float("inf")
    for i, (least, _, plan) in enumerate(ordered := sorted(waiting)):
        if least >= best:
            for _, _, other in ordered[i:]:
                families[other.placement.name].pruned += 1
            break
        one = _simulated(plan, cluster, model, constants, goal)
        families[plan.placement.name].simulated += 1
        found.append(one)
        best = min(best, one.score)
    found.sort(key=lambda one: one.score)
    for one in reversed(found):
        families[one.plan.placement.name].best = one
    if not found:
        return Answer(None, None, families, [], {}, [])
    pick = found[0]
    runner = next((one for one in found[1:] if _differs(one.plan, pick.plan)), None)
    if runner is None and len(ordered) > len(found):  # pruned, so its bound alone says that it lost
        runner = next((_simulated(plan, cluster, model, constants, goal) for _, _, plan in ordered[len(found):]
                       if _differs(plan, pick.plan)), None)
    if runner is not None:
        families[runner.plan.placement.name].best = families[runner.plan.placement.name].best or runner
    gains = _gains(pick, cluster, model, constants, goal) if explain else {}
    flips = _flips(pick, runner, cluster, model, constants, goal) if explain and runner is not None else []
    return Answer(pick, runner, families, _front([*found, *([runner] if runner else [])]), gains, flips)


def candidates(
    cluster: Cluster, model: ModelShape, *, batch: int | None = None, placements: Sequence[str] = (),
    late: bool = False,
) -> Iterator[Plan]:
    """Every plan on all devices of the cluster. Recompute follows where a plan without does not fit (`search`)."""
    total, inside = cluster.device_count, min(host.devices for host in cluster.workers)
    for name in placements or PLACEMENTS:
        one = PLACEMENTS.get(name)
        if one is None:
            raise ConfigError(f"no placement is called {name!r}", hint=f"known are {', '.join(PLACEMENTS)}")
        for layout in layouts(cluster, model, total, inside, one):
            for micro_batch, micros in batches(layout, batch):
                for recompute in (False, True):
                    plan = Plan(one, layout, micro_batch, micros, recompute=recompute)
                    for choice in options(plan):
                        yield choice
                        if late and not choice.placement.streamed:
                            continue
                        if late:
                            yield choice.changed(staleness=1)


def layouts(cluster: Cluster, model: ModelShape, total: int, inside: int, one: Placement) -> Iterator[Layout]:
    for tp in (n for n in range(1, inside + 1) if inside % n == 0 and n & (n - 1) == 0):
        if tp > 1 and (one.streamed or not model.heads or model.heads % tp):
            continue
        for pp in (n for n in range(1, min(MOST_PP, max(1, model.layers), total // tp) + 1) if total // tp % n == 0):
            if pp > 1 and one.streamed:
                continue
            dp = total // tp // pp
            yield Layout(dp, tp, pp)
            if pp > 1 and (stages := _by_speed(cluster, model.layers, dp * tp, pp)) is not None:
                yield Layout(dp, tp, pp, stages)


def _by_speed(cluster: Cluster, layers: int, per_stage: int, pp: int) -> tuple[int, ...] | None:
    """Layers of each stage by its slowest device's speed, where devices differ."""
    flops = [host.device.flops for host in cluster.workers for _ in range(host.count * host.devices) if host.device]
    speeds = [min(flops[i * per_stage : (i + 1) * per_stage]) for i in range(pp)]
    if len(set(speeds)) == 1 or layers < pp:
        return None
    return uneven(layers, speeds, alpha=1.0)


def batches(layout: Layout, batch: int | None) -> Iterator[tuple[int, int]]:
    """(micro-batch, passes) whose product is the batch; without one, passes that fill a pipeline."""
    size = 1
    while size <= MOST_MICRO_BATCH:
        if batch is None:
            yield size, 1 if layout.pp == 1 else 4 * layout.pp
        elif batch % (layout.dp * size) == 0:
            yield size, batch // (layout.dp * size)
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
    if goal == "cost":
        return scene.price_per_s() * seconds / plan.samples
    if goal == "energy":
        return scene.watts({}) * seconds / plan.samples
    return seconds / plan.samples


def _simulated(plan: Plan, cluster: Cluster, model: ModelShape, constants: Constants, goal: str) -> Found:
    result = simulate(plan, cluster, model, constants, checked=False)
    worth = {"time": result.seconds, "cost": result.price, "energy": result.joules}[goal]
    return Found(plan, result, worth / plan.samples)


def _differs(one: Plan, other: Plan) -> bool:
    """Whether it is another way, not another batch of the same."""
    return (one.placement, one.layout) != (other.placement, other.layout)


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
        return cluster.model_copy(update={"hosts": tuple(h.model_copy(update=change(h)) for h in cluster.hosts)})

    def device(host: Host, name: str) -> dict[str, Any]:
        own = host.device
        return {} if own is None else {"device": own.model_copy(update={name: getattr(own, name) * factor})}

    def ssds(host: Host) -> dict[str, Any]:
        return {"ssds": tuple(s.model_copy(update={name: getattr(s, name) * factor for name in
                                                   ("read", "write", "internal", "updates")}) for s in host.ssds)}

    out = {
        "computing": hosts(lambda h: device(h, "flops")),
        "network": hosts(lambda h: {"nics": tuple(n.model_copy(update={"rate": n.rate * factor}) for n in h.nics)}),
        "PCIe": hosts(lambda h: device(h, "copy_rate")), "device links": hosts(lambda h: {"fabric": h.fabric * factor}),
        "host updates": hosts(lambda h: {"updates": h.updates * factor}),
        "host sums": hosts(lambda h: {"sums": h.sums * factor}),
        "host memory": hosts(lambda h: {"memory_rate": h.memory_rate * factor}),
    }
    if any(host.ssds for host in cluster.hosts):
        out |= {"SSDs": hosts(ssds), "SSD uplink": hosts(lambda h: {"uplink": h.uplink * factor})}
    return out


def _gains(pick: Found, cluster: Cluster, model: ModelShape, constants: Constants, goal: str) -> dict[str, float]:
    gains = {}
    for name, other in scaled(cluster, MORE).items():
        gain = 1 - _with(pick, name, other, model, constants, goal) / pick.score
        if gain > 1e-4:
            gains[name] = gain
    return dict(sorted(gains.items(), key=lambda pair: -pair[1]))


def _with(one: Found, name: str, other: Cluster, model: ModelShape, constants: Constants, goal: str) -> float:
    """Its score where what is called `name` is as fast as in `other`: its own if it does not use that."""
    tensor = name == "device links" and one.plan.layout.tp > 1  # that time is counted as the device's
    if name in ENDS and not tensor and not any(n and what.endswith(ENDS[name]) for what, n in one.result.bytes.items()):
        return one.score
    return _simulated(one.plan, other, model, constants, goal).score


def _flips(pick: Found, runner: Found, cluster: Cluster, model: ModelShape, constants: Constants,
           goal: str) -> list[str]:
    out = []
    for factor, words in ((SMALLER, "half as fast"), (1 / SMALLER, "twice as fast")):
        for name, other in scaled(cluster, factor).items():
            mine, its = (_with(one, name, other, model, constants, goal) for one in (pick, runner))
            if its < mine * (1 - 1e-3):
                out.append(f"{name} {words}")
    return out


def least_change(answer: Answer) -> tuple[Need, Plan] | None:
    """Of all plans that fit nowhere, the need nearest to its room."""
    near = [family.nearest for family in answer.families.values() if family.nearest is not None]
    return min(near, key=lambda pair: _over(pair[0]), default=None)
