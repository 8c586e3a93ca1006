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
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.buffers import buffer_bytes
from benchmarks.common.report import Report, Row
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
BUDGET = "96MiB"
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
    near = sum(
        row.of_floor is not None and abs(row.of_floor - 1) <= GOAL
        for row in rows
        if row.metric == "a step"
    )
    cases = sum(row.metric == "a step" for row in rows)
    rows.append(
        Row(
            "all",
            f"within {GOAL:.0%}, of {cases}",
            "",
            float(near),
            goal=f"ours >= {ENOUGH}",
            met=near >= ENOUGH,
        )
    )
    return Report("reality", rows)


@dataclass(frozen=True)
class Real:
    step_s: float
    memory: float = 0.0  # bytes of a worker's buffers, as the worker counts them
    planned: float = 0.0  # the same, by arithmetic from its plan


def _rows(case: Case, real: Real, result: Result) -> list[Row]:
    off = result.seconds / real.step_s
    rows = [
        Row(
            case.name,
            "a step",
            "s",
            result.seconds,
            peer=real.step_s,
            peer_name="measured",
            of_floor=off,
            goal=f"within {GOAL:.0%}",
            met=abs(off - 1) <= GOAL,
        )
    ]
    if real.memory:
        rows.append(
            Row(
                case.name,
                "buffers of a worker",
                "MB",
                real.planned / 1e6,
                peer=real.memory / 1e6,
                peer_name="measured",
                of_floor=real.planned / real.memory,
                goal="within 5 %",
                met=abs(real.planned / real.memory - 1) <= 0.05,
            )
        )
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
    job = job_of(
        {
            **words,
            "run.dir": str(home / f"known{threads}"),
            "store.files": [],
            "budget.host": "400MiB",
        }
    )
    found = workers([(subprocess.Popen, job)], home, threads, STEPS)[0]
    host = {
        "name": "here",
        "devices": 1,
        "device": {
            "kind": "cpu" if threads > 1 else "device",
            "flops": "1TFLOP/s",
            "memory": "24GB",
            "memory_rate": "20GB/s",
            "copy": "10GB/s",
        },
        "memory": "24GB",
        "memory_rate": "20GB/s",
    }
    return fit_rates(make_cluster({"name": "here", "hosts": [host]}), found)


def _placed(case: Case, home: Path, machines: Mapping[int, Cluster]) -> tuple[Real, Result]:
    words = {**dict(case.words), "run.dir": str(home / "run" / str(time.monotonic_ns()))}
    with ExitStack() as stack:
        if case.kind == "files":
            devices = [
                stack.enter_context(LoopDevice(home / f"ssd{i}", 600 * MIB))
                for i in range(case.many)
            ]
            limit = stack.enter_context(Throttle(devices, *case.rates))
            words["store.files"] = [str(Path(device.mount) / "store") for device in devices]
            found = workers([(subprocess.Popen, job_of(words))], home, 2, STEPS, limit)
        # measured again, because the processors' speed varies over minutes
        elif case.kind == "memory":
            machines = {2: calibrated(home, 2, {})}
            words |= {"store.files": [], "budget.host": "400MiB"}
            found = workers([(subprocess.Popen, job_of(words))], home, 2, STEPS)
        else:
            names = [
                f"{kind}{i}"
                for kind, n in (("w", case.workers), ("s", case.many))
                for i in range(n)
            ]
            network = stack.enter_context(
                Network({name: [LabNic(case.rates[0])] for name in names})
            )
            words["servers.addresses"] = stack.enter_context(
                servers(network, case.many, home, "--budget", "400MiB")
            )
            words["servers.token_file"] = str(home / "token")
            words["budget.host"] = "400MiB"
            found = workers(
                [(network.hosts[f"w{i}"].run, job_of(words)) for i in range(case.workers)],
                home,
                1,
                STEPS,
            )
    plan, shape = found[0].plan, found[0].shape
    host = machines[1 if case.kind == "server" else 2].hosts[0]
    hosts: list[dict[str, Any]] = [host.model_dump(mode="json", by_alias=True)]
    if case.kind == "files":
        read, write = case.rates
        hosts[0]["ssds"] = [
            {
                "count": case.many,
                "read": rate(read),
                "write": rate(write),
                "mixed": 2,
                # the throttle serves requests in the order of their arrival
                "depth": 1,
                "capacity": "600MB",
            }
        ]
    if case.kind == "server":
        nics = [{"rate": rate(case.rates[0] * CARRIED)}]
        hosts[0] |= {"nics": nics, "count": case.workers}
        hosts.append(
            {
                "name": "server",
                "count": case.many,
                "memory": "24GB",
                "memory_rate": "20GB/s",
                "nics": nics,
                "updates": hosts[0]["updates"],
                "sums": hosts[0]["sums"],
            }
        )
    cluster = make_cluster({"name": case.name, "hosts": hosts})
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
        "memory": "24GB",
        "memory_rate": "20GB/s",
        "device": {
            "flops": f"{flops / 1e12}TFLOP/s",
            "memory": "24GB",
            "memory_rate": "20GB/s",
            "copy": "10GB/s",
        },
        "nics": nics,
    }
    spare = [
        {
            "name": "spare",
            "count": case.many,
            "memory": "24GB",
            "memory_rate": "20GB/s",
            "nics": nics,
        }
    ]
    cluster = make_cluster({"name": case.name, "hosts": [own, *spare[: case.many]]})
    plan = Plan(
        placement("summation"),
        Parallelism(dp=case.workers),
        micro_batch=batch,
        update_at="step",
        sizes=ElementBytes(parameter_bytes=4, gradient_bytes=4, held_bytes=4, state_bytes=0),
    )
    return Real(took), simulate(plan, cluster, shape, EXACT, checked=False)
