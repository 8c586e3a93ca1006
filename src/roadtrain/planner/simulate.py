"""`roadtrain simulate CLUSTER.toml`: predict the step time, busy resources, memory, energy and cost
of a plan on a cluster. The cluster need not exist.

The simulation runs the state machines of real processes on a virtual clock (simulator/). torch is
imported only if the shape of the model has to be counted from its modules. The trace can be opened
in ui.perfetto.dev. Kinds of work have the same names in the trace as in the metrics of a real run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from roadtrain.config.cluster import Cluster, guesses, load_cluster
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import Plan, load_plan, make_plan
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.planner.fit_inputs import model_of
from roadtrain.planner.trace_events import trace_events
from roadtrain.simulator.compute import LAUNCH_S, Constants
from roadtrain.simulator.compute import constants as named
from roadtrain.simulator.fabric import INSIDE_S, UPDATE_BYTES
from roadtrain.simulator.memory import kept_free
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.networks import KINDS
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.units import (
    show_bytes,
    show_flops,
    show_joules,
    show_number,
    show_params,
    show_seconds,
)

SCHEMA = 1
UNSET = (None, "")  # values that an option has if it was not given
# suffixes of the names of network cards and of links between switches, whose traffic is reported
CARDS = (*(f" {kind} {way}" for kind in KINDS for way in ("out", "in")), " link")


def default_plan(cluster: Cluster, overrides: Mapping[str, Any]) -> Plan:
    """Return a plan with placement zero3 in which all devices are data-parallel ranks. `overrides`:
    keys of a plan file with other values."""
    tree = {"placement": "zero3", **overrides}
    parallelism = dict(tree.pop("parallelism", {}))
    degrees = [int(parallelism.get(name, 1)) for name in ("tp", "pp", "cp")]
    ranks = math.prod(degrees)
    if "dp" not in parallelism and min(degrees) > 0:  # make_plan reports a degree below 1
        if cluster.device_count % ranks:
            raise ConfigError(
                f"tp x pp x cp = {ranks} does not divide the {cluster.device_count} devices",
                hint="choose other values of tp, pp and cp, or set dp",
            )
        parallelism["dp"] = max(1, cluster.device_count // ranks)
    return make_plan({**tree, "parallelism": parallelism})


def assumptions(
    cluster: Cluster, model: ModelShape, of: Constants, plan: Plan | None
) -> dict[str, tuple[float, str]]:
    """Return all values that a prediction assumes, by name. Each is a pair: a number (rates are in
    bytes/s), and a text for the user."""
    out = guesses(cluster) | {
        "step inside a host": (INSIDE_S, show_seconds(INSIDE_S)),
        "bytes a parameter's update": (UPDATE_BYTES, f"{UPDATE_BYTES:g}"),
    }
    if of.source == "assumed":
        if not of.table:
            out["efficiency"] = of.efficiency, f"{of.efficiency:g} of a device's peak"
        out["network"] = of.network, f"{of.network:g} of a network card's rate"
    if plan is not None:
        if least_forward(cluster, model, of, plan) <= LAUNCH_S:
            out["a block's forward at least"] = LAUNCH_S, show_seconds(LAUNCH_S)
        besides = plan.framework.context_bytes
        out["device memory besides"] = besides, show_bytes(besides)
        if plan.placement.update != "device" or plan.placement.state != "device":
            state = plan.sizes.state_bytes
            out["optimizer state a parameter"] = state, f"{state:g} B"
    return out


def least_forward(cluster: Cluster, model: ModelShape, of: Constants, plan: Plan) -> float:
    """Return the seconds of the shortest forward pass of a block that computes."""
    found = [
        of.of_host(host.name).forward_of(block, plan, host.device)
        for host in cluster.workers
        for block in model.blocks
        if host.device is not None and (block.flops or block.tables)
    ]
    return min(found, default=float("inf"))


def assumed(cluster: Cluster, model: ModelShape, of: Constants, plan: Plan | None) -> list[str]:
    """Return lines for the user that list the assumptions."""
    own, every = guesses(cluster), assumptions(cluster, model, of, plan)
    # the assumptions on the cluster are the first ones
    texts = [f"{name} {words}" for name, (_, words) in every.items()]
    of_cluster = ", ".join(texts[: len(own)]) or "nothing of the cluster"
    lines = [of_cluster, ", ".join(texts[len(own) :]), *model.notes]
    return [f"assumed {line}" for line in lines]


def not_counted(plan: Plan, model: ModelShape) -> list[str]:
    """Return lines for the user that list effects that the prediction leaves out: the copy of tied
    embeddings on the last pipeline stage, and the exchange of their gradients."""
    last = model.blocks[-1]
    table = last.logits / model.tokens * model.hidden
    if last.params >= table or plan.parallelism.pp == 1:
        return []
    traffic = f"{show_bytes(4 * table)} of gradients each way, and the last stage's copy of them"
    return [f"not counted: embeddings that the first and the last stage share: {traffic}"]


def report(result: Result, cluster: Cluster, model: ModelShape, of: Constants) -> str:
    """Return the text of the report on a simulated plan."""
    plan, parallelism = result.plan, result.plan.parallelism
    flops = model.step_flops(plan.activation_checkpointing) * plan.samples
    flops_per_s = flops / result.seconds / parallelism.devices
    lines = [
        (
            f"{model.name} ({show_params(model.params)} parameters) on {cluster.name}: placement"
            f" {', '.join(plan.stage_placements) or plan.placement.name}, {parallelism},"
            f" micro-batch {plan.micro_batch} x {plan.num_microbatches}"
            + (" over all replicas" if parallelism.widths else "")
        ),
        (
            f"a step  {show_seconds(result.seconds)}, {show_number(result.samples_per_s)}"
            f" samples/s, {show_flops(flops_per_s)} per device ("
            f"{'estimated from shorter ones; ' * result.estimated}the last two steps differ by"
            f" {show_seconds(result.differ)})"
        ),
    ]
    lines += switches.lines(plan, cluster)
    if plan.staleness or plan.keep is not None:
        lines.append(f"lossy or late: staleness {plan.staleness}, keep {plan.keep}")
    shares = sorted(result.busy.items(), key=lambda pair: -pair[1])
    busiest = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.05)
    lines.append(f"busy    {busiest}")
    for stage in sorted({where for where, _ in result.stages if where}):
        parts = {what: both for (where, what), both in result.stages.items() if where == stage}
        busy = result.busy.get(f"{stage} device")
        if busy is None and not any(seconds for seconds, _ in parts.values()):
            continue  # communication between replicas of a stage that has only one replica
        waits = "" if busy is None else f"the device waits {1 - busy:.0%}; "
        entries = []
        for what, (seconds, work) in parts.items():
            carried = work and what not in ("Forward", "Backward", "Wait")
            if seconds > 0 and what != "Message":
                nbytes = f" ({show_bytes(work)})" if carried else ""
                entries.append(f"{what} {show_seconds(seconds)}{nbytes}")
        lines.append(f"{stage}: {waits}{', '.join(entries)}")
    lines += [
        f"carried {name}: {show_bytes(nbytes)} per step"
        for name, nbytes in result.bytes.items()
        if nbytes and name.endswith(CARDS)
    ]
    lines += [
        f"memory  {need.where}: {show_bytes(need.nbytes)} of {show_bytes(need.room)}"
        for need in result.needs
        if need.nbytes
    ]
    lines.append(f"memory  {kept_free(plan)}")
    if result.watts:
        kilowatts = show_number(result.watts / 1e3)
        lines.append(f"energy  {show_joules(result.joules)} per step, {kilowatts} kW")
    if result.price:
        lines.append(
            f"cost    {show_number(result.price)} per step,"
            f" {show_number(plan.samples / result.price)} samples for 1"
        )
    lines += [
        f"computing time from {of.from_what} ({of.source})",
        *assumed(cluster, model, of, plan),
        *not_counted(plan, model),
    ]
    return "\n".join(lines)


def as_json(result: Result, cluster: Cluster, model: ModelShape, of: Constants) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": model.name,
        "params": model.params,
        "cluster": cluster.name,
        "plan": {**asdict(result.plan), "placement": result.plan.placement.name},
        "step_s": result.seconds,
        "differ_s": result.differ,
        "estimated": result.estimated,
        "samples_per_s": result.samples_per_s,
        "busy": result.busy,
        "bytes": result.bytes,
        "stages": [
            {"where": where, "stage": stage, "seconds": s, "work": w}
            for (where, stage), (s, w) in result.stages.items()
        ],
        "memory": [asdict(need) for need in result.needs],
        "peaks": result.peaks,
        "joules": result.joules,
        "price": result.price,
        "headroom": result.plan.headroom,
        "tokens": model.tokens,
        **assumed_json(cluster, model, of, result.plan),
    }


def assumed_json(
    cluster: Cluster, model: ModelShape, of: Constants, plan: Plan | None
) -> dict[str, Any]:
    """Return the assumptions as plain data for JSON: the assumed keys of the cluster file, all
    assumed values by name, and the notes on the model."""
    values = {name: value for name, (value, _) in assumptions(cluster, model, of, plan).items()}
    more = {"notes": model.notes, "measured": cluster.measured, "constants": of.source}
    return {"assumed": cluster.assumed, "assumed_values": values, **more}


def write_json(path: str, tree: Mapping[str, Any], indent: int | None = 1) -> None:
    replace_file(Path(path), (dumps(tree, indent=indent) + "\n").encode(), "writing")


def perfetto(result: Result) -> dict[str, Any]:
    """Return the trace of a result for Perfetto. Each pipeline stage or server is shown as a
    process, each kind of work as a thread, and each memory as a counter."""
    slices = (
        (task.where, task.stage, task.stage, task.begin, task.end, {"work": task.work})
        for task in result.trace
    )
    return trace_events(slices, result.timeline)


def command(
    cluster_file: str,
    *,
    model: str = "",
    plan: str = "",
    placement: str = "",
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    virtual_stages: int | None = None,
    precision: str = "",
    micro_batch: int | None = None,
    num_microbatches: int | None = None,
    activation_checkpointing: bool = False,
    staleness: int | None = None,
    keep: float | None = None,
    wire: str = "",
    seq_len: int | None = None,
    constants: str = "",
    headroom: float | None = None,
    apart: bool = False,
    json: str = "",
    trace: str = "",
) -> int:
    """Predict the step time, busy resources, memory, energy and cost of a plan on a cluster. The
    cluster need not exist.

    Raises ConfigError, BudgetError.

    Args:
        model: a named shape such as OPT-175B, a Hugging Face config.json, or MODULE:FUNCTION
        seq_len: tokens of a sample (a config.json: 4096 or its longest; a shape: as published)
        headroom: fraction of device and host memory that stays free (that of --plan, or 0.05)
        plan: plan.toml to simulate, instead of the options below
        placement: ddp, zero3, zero-offload, zero-infinity, near-storage, optimizer-node, ...
            (zero3)
        dp: data-parallel ranks (all devices)
        tp: tensor-parallel ranks (1)
        pp: pipeline stages (1)
        cp: context-parallel ranks (1)
        ep: expert-parallel ranks; they divide dp x cp (1)
        virtual_stages: interleaved parts of the model per stage (1)
        precision: number format of the layers' products, such as fp8 (16 bits)
        micro_batch: samples per device and pass (1)
        num_microbatches: passes per step (1)
        activation_checkpointing: keep only blocks' inputs for backward and recompute the rest
        staleness: updates that a step may miss; 1: a step runs during the last step's update (0)
        keep: fraction of each gradient's elements that is sent (all)
        wire: integers in which gradients cross switches: int32, int16 or int8 (int32)
        constants: name of the fitted constants for computing times
        apart: simulate each data-parallel rank separately, on network cards that all share
        json: also write the result as JSON to this file
        trace: also write a trace for ui.perfetto.dev to this file
    """
    for written in filter(None, (json, trace)):
        check_file(Path(written))
    cluster, shape = load_cluster(cluster_file), model_of(model, seq_len).shape
    if plan:
        chosen = load_plan(plan)
        chosen = chosen if headroom is None else chosen.changed(headroom=headroom)
    else:
        options: dict[str, Any] = {
            "placement": placement,
            "micro_batch": micro_batch,
            "num_microbatches": num_microbatches,
            "activation_checkpointing": activation_checkpointing or None,
            "staleness": staleness,
            "keep": keep,
            "headroom": headroom,
            "framework": {"precision": precision} if precision else None,
            "packets": {"wire": wire} if wire else None,
        }
        ranks = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
        ranks["virtual_stages"] = virtual_stages
        options["parallelism"] = {name: n for name, n in ranks.items() if n is not None}
        chosen = default_plan(cluster, {k: v for k, v in options.items() if v not in UNSET})
    of = named(constants) if constants else Constants()
    result = simulate(chosen, cluster, shape, of, traced=bool(trace), apart=apart)
    print(report(result, cluster, shape, of))
    if json:
        write_json(json, as_json(result, cluster, shape, of))
    if trace:
        write_json(trace, perfetto(result), indent=None)
        print(f"trace   {trace} (open it in ui.perfetto.dev)")
    return 0
