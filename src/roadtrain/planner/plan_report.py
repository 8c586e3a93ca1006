"""Report the result of a search as text and JSON: the best plan, why this plan is best, what would
make the plan faster, and why other plans lost. If no plan fits, report the smallest change that
would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from roadtrain.config.cluster import Cluster
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import Plan
from roadtrain.planner import switches
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.search import Family, Found, SearchResult, least_change, main_reason
from roadtrain.planner.simulate import SCHEMA, as_json, assumed, assumed_json, report
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.memory import kept_free
from roadtrain.units import show_bytes, show_joules, show_number, show_params, show_seconds

SCORES = {"time": show_seconds, "cost": show_number, "energy": show_joules}
BETWEEN = ("spares", "separate")  # ways of summing that are needed only between hosts


def words(plan: Plan, cluster: Cluster | None = None) -> str:
    """Describe a plan in one sentence.

    Args:
        plan: The plan.
        cluster: The plan's cluster, which shows whether gradients leave a host. If None, the text
            assumes that gradients leave a host.
    """
    place, parallelism = plan.placement, plan.parallelism
    rests = {
        "device": "on every device",
        "split": "split over the devices",
        "host": "in the hosts' memory",
        "ssd": "on the hosts' SSDs",
        "server": "at the server",
    }
    sums = {
        "ring": "a ring",
        "switch": f"switches as {plan.packets.wire}",
        "spares": "the summation service",
        "separate": "the spare hosts",
        "relay": "a relay beside each host",
        "server": "the server",
    }
    widths = "+".join(map(str, parallelism.widths))
    parts = [
        f"{place.name}: parameters {rests[place.parameters]}, optimizer state {rests[place.state]}"
    ]
    if max(plan.widths) > 1:
        inside = cluster is not None and place.sum in BETWEEN and _stages_are_inside(plan, cluster)
        parts.append(
            f"gradients summed by {'the devices of a host' if inside else sums[place.sum]}"
        )
    parts.append(
        f"updates {'beside the SSDs' if place.update == 'ssd' else 'on the ' + place.update}"
    )
    degrees = (widths or parallelism.dp, parallelism.cp, parallelism.tp, parallelism.pp)
    groups = zip(degrees, ("data", "context", "tensor", "pipeline"))
    ranks = [f"{n} {what}" for n, what in groups if n != 1]
    parts.append(" x ".join(ranks) + "-parallel" if ranks else "one device")
    if parallelism.ep > 1:
        parts.append(f"experts spread over {parallelism.ep}")
    if parallelism.virtual_stages > 1:
        parts.append(f"{parallelism.virtual_stages} interleaved parts of the model per stage")
    if parallelism.stages:
        parts.append(f"stages of {', '.join(map(str, parallelism.stages))} layers")
    parts.append(
        f"micro-batch {plan.micro_batch} x {plan.num_microbatches}"
        + (" over all replicas" if widths else "")
        + (", activation checkpointing" if plan.activation_checkpointing else "")
    )
    if plan.memory.kept or (plan.placement.streamed and plan.memory.slots >= EVERY):
        parts.append("blocks kept from forward to backward")
    if plan.staleness:
        parts.append(f"updates {plan.staleness} step(s) late (lossy)")
    return "; ".join(parts)


def _stages_are_inside(plan: Plan, cluster: Cluster) -> bool:
    """Return True if each stage of the plan is on one host."""
    hosts = enumerate(switches.hosts_of(plan, cluster))
    slots = [number for number, host in hosts for _ in range(host.devices)]
    ends = itertools.pairwise(plan.parallelism.first_ranks)
    return all(len(set(slots[begin:stop])) == 1 for begin, stop in ends)


def answer_text(
    answer: SearchResult, cluster: Cluster, model: ModelShape, goal: str, of: Constants
) -> str:
    """Return the text of the report: the best plan, why this plan is best, what would make the plan
    faster, and why other plans lost."""
    pick = answer.pick
    if pick is None:
        return no_plan_text(answer, cluster, model, of)
    result = pick.result
    top, share = max(result.busy.items(), key=lambda pair: pair[1])
    scored = f"{goal} per sample {SCORES[goal](pick.score)}"
    lines = [
        "pick    " + words(pick.plan, cluster),
        _batch_line(answer, model),
        report(result, cluster, model, of),
        f"why     {top} is busy {share:.0%} of a step; {scored}",
    ]
    gains = ", ".join(f"{name} saves {gain:.1%}" for name, gain in answer.gains.items())
    lines.append(f"10 % more of {gains or 'no single resource helps'}")
    if (runner := answer.runner_up) is not None:
        top, share = max(runner.result.busy.items(), key=lambda pair: pair[1])
        lines.append(
            f"second  {words(runner.plan, cluster)}: {runner.score / pick.score - 1:+.1%} {goal}"
            f" per sample; {top} is busy {share:.0%}"
        )
        flips = " or with ".join(answer.flips) or "no single rate halved or doubled"
        lines.append(f"        it would win with {flips}")
    free = _unpriced(cluster, goal)
    return "\n".join(
        [*lines, *([f"assumed {', '.join(free)}"] if free else []), *_family_lines(answer, pick)]
    )


def _batch_line(answer: SearchResult, model: ModelShape) -> str:
    tokens = f" ({answer.batch * model.tokens} tokens)" if model.tokens > 1 else ""
    return f"batch   {answer.batch} samples{tokens} per step: {answer.chosen or 'as given'}"


def _unpriced(cluster: Cluster, goal: str) -> list[str]:
    """Return lines for the user on each price or power that the goal needs but the cluster file
    lacks, with the value that is used instead."""
    if goal == "cost":
        free = (host.name for host in cluster.hosts if not host.price_per_hour)
        return [f"hosts.{name}.price_per_hour 0" for name in free]
    if goal == "energy":
        return [
            f"hosts.{host.name}.{what}peak_watts {of.idle_watts:g}"
            for host in cluster.hosts
            for what, of in (("", host), ("device.", host.device))
            if of is not None and not of.peak_watts
        ]
    return []


def _family_lines(answer: SearchResult, pick: Found | None) -> Iterable[str]:
    def score(named: tuple[str, Family]) -> float:
        return named[1].best.score if named[1].best else named[1].least

    for name, family in sorted(answer.families.items(), key=score):
        yield f"  {name:17}{family.tried:5} plans: {_fate(family, pick)}"


def _fate(family: Family, pick: Found | None) -> str:
    parts = []
    if pick is not None and family.best is pick:
        parts.append("the pick")
    elif family.best is not None and pick is not None:
        parts.append(f"best {family.best.score / pick.score - 1:+.1%}")
    elif family.pruned and pick is not None:
        parts.append(f"at least {family.least / pick.score - 1:+.1%} by their bound")
    for reason, count in sorted(family.refused.items(), key=lambda pair: -pair[1]):
        parts.append(f"{count} refused: {reason}")
    parts += [f"{count} not tried: {reason}" for reason, count in family.left_out.items()]
    if family.nearest is not None:
        need, _ = family.nearest
        parts.append(
            f"nearest miss {show_bytes(need.nbytes)} of {show_bytes(need.room)} ({need.where})"
        )
    return "; ".join(parts) or "none simulated"


def no_plan_text(answer: SearchResult, cluster: Cluster, model: ModelShape, of: Constants) -> str:
    """Return a text that explains why no plan fits, and the smallest change that would help."""
    lines = [
        f"no plan fits: {model.name} ({show_params(model.params)} parameters) on {cluster.name}"
    ]
    if (reason := main_reason(answer)) is not None:
        lines += [f"why     {reason[0]}", *([f"hint    {reason[1]}"] if reason[1] else [])]
    if (near := least_change(answer)) is not None:
        need, plan = near
        lines.append(
            f"least change: {show_bytes(need.lacking)} more for {need.where}"
            f" ({show_bytes(need.nbytes)} instead of {show_bytes(need.room)}) makes this plan fit:"
            f" {words(plan, cluster)}"
        )
        lines.append(f"memory  {kept_free(plan)}")
    lines += assumed(cluster, model, of, None if near is None else near[1])
    return "\n".join([*lines, *_family_lines(answer, None)])


def answer_json(
    answer: SearchResult, cluster: Cluster, model: ModelShape, goal: str, of: Constants
) -> dict[str, Any]:
    """Return the result of a search as plain data for JSON, with a schema version."""

    def as_tree(found: Found | None) -> dict[str, Any] | None:
        if found is None:
            return None
        scored = {"score": found.score, "words": words(found.plan, cluster)}
        return as_json(found.result, cluster, model, of) | scored

    near = least_change(answer)
    counted = ("tried", "simulated", "pruned", "refused", "left_out")
    return {
        "schema": SCHEMA,
        "goal": goal,
        "pick": as_tree(answer.pick),
        "runner_up": as_tree(answer.runner_up),
        "gains": answer.gains,
        "runner_up_wins_with": answer.flips,
        "front": [as_tree(found) for found in answer.front],
        "families": [
            {
                "placement": name,
                **{key: getattr(f, key) for key in counted},
                "nearest": None if f.nearest is None else asdict(f.nearest[0]),
                "best": None if f.best is None else f.best.score,
            }
            for name, f in answer.families.items()
        ],
        "least_change": None
        if near is None
        else {**asdict(near[0]), "plan": words(near[1], cluster)},
        "batch": answer.batch,
        "batch_chosen": answer.chosen,
        "unpriced": _unpriced(cluster, goal),
        **assumed_json(cluster, model, of, None if answer.pick is None else answer.pick.plan),
    }
