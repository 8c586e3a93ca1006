"""Compare predicted with measured step times, in twelve configurations of this machine and of an
emulated cluster. The configurations were chosen before any run.

    files   state on throttled loop devices: staleness, top-k, one and two devices
    memory  state in RAM
    server  one or two workers and servers over emulated links: staleness, blocks kept from
            forward to backward, top-k
    sums    DDP's gradients through the summation service, with and without spare hosts

The predictions use the configured rates of loop devices and links, of which TCP carries 0.956, and
the measurements of a single other run: the same model in memory or, for `sums`, a step without any
exchange. No constant is fitted to the twelve configurations. The time of a step is measured on the
slowest worker, as the median of four steps. Needs root.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.buffers import buffer_bytes
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from benchmarks.sums import steps as summation_steps
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.job import Job, make_job
from roadtrain.config.plan_file import ElementBytes, Plan, placement
from roadtrain.errors import ConfigError
from roadtrain.lab import (
    CARRIED,
    LabNic,
    LoopDevice,
    Network,
    Throttle,
    lab_available,
    network_available,
)
from roadtrain.planner.calibrate import EXACT, fit_rates
from roadtrain.planner.calibrate_lab import servers, workers
from roadtrain.planner.calibrate_steps import Measured
from roadtrain.planner.measure import shape_of
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism
from roadtrain.units import MIB

STEPS = 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
}
BUDGET, ROOMY = "96MiB", "400MiB"
IN_MEMORY: Mapping[str, Any] = {"store.files": [], "budget.host": ROOMY}
MEMORY = {"memory": "24GB", "memory_rate": "20GB/s"}  # of every host and device
GOAL, ENOUGH = 0.10, 10


@dataclass(frozen=True)
class Case:
    """A configuration to predict and to measure. `rates`: bytes/s of a disk's reads and writes, or
    of a link in each direction. `words`: pairs (option of the job, value).
    """

    name: str
    kind: str
    rates: tuple[float, ...] = ()
    many: int = 1  # number of devices, or of spare hosts
    workers: int = 1
    words: tuple[tuple[str, Any], ...] = ()


LATE, TOPK = ("optimizer.delay", 1), ("compress.keep", 0.01)
ALL, NONE = ("servers.buffering", "all"), ("servers.buffering", "none")
CASES = (
    Case("files, one device of 80 and 40 MB/s", "files", (80e6, 40e6)),
    Case("files, one device of 80 and 40 MB/s, staleness 1", "files", (80e6, 40e6), words=(LATE,)),
    Case("files, two devices of 40 MB/s each way", "files", (40e6, 40e6), 2),
    Case("files, one device of 80 and 40 MB/s, top-k 2 %", "files", (80e6, 40e6), words=(TOPK,)),
    Case("memory, staleness 1", "memory", words=(LATE,)),
    Case("server, 100 Mbit/s, all blocks kept", "server", (12.5e6,), words=(ALL,)),
    Case(
        "server, 100 Mbit/s, all blocks kept, staleness 1", "server", (12.5e6,), words=(ALL, LATE)
    ),
    Case("server, 100 Mbit/s, no block kept", "server", (12.5e6,), words=(NONE,)),
    Case(
        "2 workers, 2 servers, 200 Mbit/s, no block kept, staleness 1",
        "server",
        (25e6,),
        2,
        2,
        (NONE, LATE),
    ),
    Case("server, 100 Mbit/s, no block kept, top-k 2 %", "server", (12.5e6,), words=(NONE, TOPK)),
    Case("sums, 4 workers, 400 Mbit/s", "sums", (50e6,), 0, 4),
    Case("sums, 4 workers, 4 spare hosts, 400 Mbit/s", "sums", (50e6,), 4, 4),
)


def run(quick: bool = False) -> Report:
    if (why := lab_available() or network_available()) is not None:
        raise ConfigError(f"the lab cannot be set up on this machine: {why}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        home = Path(name)
        machines = {threads: calibrated(home, threads, {}) for threads in (2, 1)}
        for case in [CASES[i] for i in (0, 5)] if quick else CASES:
            real, result = _sums(case) if case.kind == "sums" else _placed(case, home, machines)
            rows += _rows(case, real, result)
            print(
                f"{case.name}: {real.step_s:.2f} s, predicted {result.seconds:.2f} s "
                f"({result.seconds / real.step_s - 1:+.1%})",
                flush=True,
            )
    near = [made.met is True for made in rows if made.metric == "a step"]
    metric, goal = f"within {GOAL:.0%}, of {len(near)}", f"ours >= {ENOUGH}"
    return Report("reality", [*rows, row("all", metric, "", float(sum(near)), goal=goal)])


@dataclass(frozen=True)
class Real:
    step_s: float
    memory: float = 0.0  # bytes of a worker's buffers, as the worker counts them
    planned: float = 0.0  # the same, by arithmetic from its plan


def _rows(case: Case, real: Real, result: Result) -> list[Row]:
    figures = [("a step", "s", result.seconds, real.step_s, GOAL)]
    if real.memory:
        figures.append(("buffers of a worker", "MB", real.planned, real.memory, 0.05))
    rows = []
    for metric, unit, ours, found, within in figures:
        off = ours / found
        made = row(case.name, metric, unit, ours, (found, "measured"), of_floor=off)
        goal, met = f"within {within:.0%}", abs(off - 1) <= within
        rows.append(replace(made, ratio=None, goal=goal, met=met))
    return rows


# jobs of one worker or several


def job_of(words: Mapping[str, Any]) -> Job:
    base = make_job(
        {
            "model": {"config": CONFIG},
            "data": {"batch_size": 1, "seq_len": 256},
            "optimizer": {"name": "adamw"},
            "budget": {"host": BUDGET},
            "store": {"chunk_elements": 1 << 18},
        }
    )
    return base.changed(dict(words))


def calibrated(home: Path, threads: int, words: Mapping[str, Any]) -> Cluster:
    """Describe this host for the simulator, with rates from a run with the whole model in memory.

    Args:
        threads: number of torch threads of this run
        words: maps an option of the job to its value
    """
    job_options: dict[str, Any] = {"run.dir": str(home / f"known{threads}"), **IN_MEMORY}
    job = job_of({**words, **job_options})
    found = workers([(subprocess.Popen, job)], home, threads, STEPS)[0]
    kind = "cpu" if threads > 1 else "device"
    host = {"name": "here", "devices": 1, "device": device(1e12, kind), **MEMORY}
    return fit_rates(make_cluster({"name": "here", "hosts": [host]}), found)


def device(flops: float, kind: str) -> dict[str, Any]:
    return {"kind": kind, "flops": f"{flops / 1e12}TFLOP/s", "copy": "10GB/s", **MEMORY}


def measured(case: Case, home: Path, threads: int, words: Mapping[str, Any]) -> list[Measured]:
    """Run the job of a case and return the measurements of its workers.

    Args:
        threads: number of torch threads of a worker
        words: options of the job, besides those of the case
    """
    words = {**words, **dict(case.words), "run.dir": str(home / "run" / str(time.monotonic_ns()))}
    with ExitStack() as stack:
        if case.kind == "memory":
            return workers(
                [(subprocess.Popen, job_of({**words, **IN_MEMORY}))], home, threads, STEPS
            )
        if case.kind == "files":
            made = (LoopDevice(home / f"ssd{i}", 600 * MIB) for i in range(case.many))
            devices = [stack.enter_context(ssd) for ssd in made]
            limit = stack.enter_context(Throttle(devices, *case.rates))
            words["store.files"] = [str(Path(ssd.mount) / "store") for ssd in devices]
            return workers([(subprocess.Popen, job_of(words))], home, threads, STEPS, limit)
        hosts = [f"w{i}" for i in range(case.workers)]
        names = hosts + [f"s{i}" for i in range(case.many)]
        network = stack.enter_context(Network({name: [LabNic(case.rates[0])] for name in names}))
        job = job_of(
            {
                **words,
                "servers.addresses": stack.enter_context(
                    servers(network, case.many, home, "--budget", ROOMY)
                ),
                "servers.token_file": str(home / "token"),
                "budget.host": ROOMY,
            }
        )
        starts = [(network.hosts[name].run, job) for name in hosts]
        return workers(starts, home, threads, STEPS)


def lab_cluster(
    name: str,
    machine: Cluster,
    *,
    ssds: int = 0,
    rates: Sequence[float] = (),
    link: float = 0.0,
    workers: int = 1,
    servers: int = 0,
) -> Cluster:
    """Describe the hosts of a lab.

    Args:
        machine: cluster whose first host has the rates of a worker
        ssds: number of SSDs of a worker
        rates: bytes/s of an SSD's reads and writes
        link: bytes/s of a host's link in each direction; 0: no network
    """
    own: dict[str, Any] = machine.hosts[0].model_dump(mode="json", by_alias=True)
    nics = {"nics": [{"rate": rate(link * CARRIED)}]} if link else {}
    worker = own | nics | {"count": workers}
    if ssds:
        read, write = map(rate, rates)
        # the throttle serves requests in the order of their arrival
        ssd = {"count": ssds, "read": read, "write": write, "mixed": 2, "depth": 1}
        worker["ssds"] = [ssd | {"capacity": "600MB"}]
    server = {"name": "server", "count": servers, **MEMORY, **nics}
    server |= {key: own[key] for key in ("updates", "sums")}
    return make_cluster({"name": name, "hosts": [worker, server] if servers else [worker]})


def _placed(case: Case, home: Path, machines: Mapping[int, Cluster]) -> tuple[Real, Result]:
    threads = 1 if case.kind == "server" else 2
    machine = machines[threads]
    if case.kind == "memory":  # again, because the processors' speed varies over minutes
        machine = calibrated(home, threads, {})
    found = measured(case, home, threads, {})
    plan, shape = found[0].plan, found[0].shape
    if case.kind == "files":
        cluster = lab_cluster(case.name, machine, ssds=case.many, rates=case.rates)
    elif case.kind == "server":
        cluster = lab_cluster(
            case.name, machine, link=case.rates[0], workers=case.workers, servers=case.many
        )
    else:
        cluster = lab_cluster(case.name, machine)
    real = Real(
        max(worker.step_s for worker in found), found[0].memory, buffer_bytes(plan, shape.blocks)
    )
    return real, simulate(plan, cluster, shape, EXACT, checked=False)


def rate(nbytes: float) -> str:
    return f"{nbytes:.0f}B/s"


# sums


def _sums(case: Case) -> tuple[Real, Result]:
    link, model = case.rates[0], "heavy in parameters"
    width, layers, batch, times, _ = summation_steps.MODELS[model]
    hosts = {f"w{i}": [LabNic(link)] for i in range(case.workers)} | {
        f"s{i}": [LabNic(link)] for i in range(case.many)
    }
    with Network(hosts) as network:
        alone = summation_steps.steps_of(network, case.workers, 0, "ddp", model, STEPS)["alone"]
        took = summation_steps.steps_of(network, case.workers, case.many, "hook", model, STEPS)[
            "seconds"
        ]
    with torch.device("meta"):
        shape = shape_of(
            summation_steps.Net(width, layers, times),
            torch.empty(batch, width),
            samples=batch,
            name="linear layers",
        )
    flops = shape.step_flops() * batch / alone
    nics = [{"rate": rate(link * CARRIED)}]
    own = {
        "name": "worker",
        "count": case.workers,
        "devices": 1,
        "device": device(flops, "device"),
        **MEMORY,
        "nics": nics,
    }
    spare = {"name": "spare", "count": case.many, **MEMORY, "nics": nics}
    cluster = make_cluster({"name": case.name, "hosts": [own, spare] if case.many else [own]})
    plan = Plan(
        placement("summation"),
        Parallelism(dp=case.workers),
        micro_batch=batch,
        update_at="step",
        sizes=ElementBytes(parameter_bytes=4, gradient_bytes=4, held_bytes=4, state_bytes=0),
    )
    return Real(took), simulate(plan, cluster, shape, EXACT, checked=False)
