"""Check that the planner picks a fast way to run a job. On five small clusters, chosen before any
run, every way to run the job is measured and compared with the planner's pick.

Each cluster has one worker host with SSDs (throttled loop devices), and one host without SSDs
behind an emulated link. The planner gets the rates of the SSDs and of the link, and the speed of
this machine. The ways are: state in files; state on the server, with all blocks kept from forward
to backward; and state on the server, with as few blocks as possible kept. The goal is that a step
of the pick takes at most 1.10 times as long as a step of the fastest way. Needs root.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report, Row
from benchmarks.planner.reality import STEPS, calibrated, job_of, rate
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import from_config
from roadtrain.config.plan_file import Plan
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
from roadtrain.planner.calibrate import EXACT
from roadtrain.planner.calibrate_lab import servers, workers
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.search import search
from roadtrain.units import MIB

# bytes/s of a device's reads and writes, number of devices, bytes/s of the link in each direction
CLUSTERS = (
    (80e6, 40e6, 1, 12.5e6),
    (20e6, 20e6, 1, 12.5e6),
    (160e6, 80e6, 1, 6.25e6),
    (40e6, 20e6, 2, 25e6),
    (90e6, 90e6, 1, 12.5e6),
)
WAYS = ("files", "server, all kept", "server, none kept")
SEQ = 32
WORDS: dict[str, Any] = {"model.dtype": "bf16", "data.seq_len": SEQ}
GOAL = 1.10


def run(quick: bool = False) -> Report:
    if (why := lab_available() or network_available()) is not None:
        raise ConfigError(f"the lab cannot be set up on this machine: {why}")
    rows: list[Row] = []
    shape = from_config(job_of({}).model.config | {"vocab_size": 256}, seq_len=SEQ)
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
        home = Path(name)
        machine = calibrated(home, 1, WORDS)
        for read, write, many, link in CLUSTERS[:1] if quick else CLUSTERS:
            cluster = described(machine, read, write, many, link)
            answer = search(
                cluster, shape, EXACT, batch=1, placements=("files", "server"), explain=False
            )
            assert answer.pick is not None
            pick = way_of(answer.pick.plan)
            took = {way: measured(way, home, read, write, many, link) for way in WAYS}
            best = min(took, key=lambda way: took[way])
            case = (
                f"{many} device(s) of {read / 1e6:g} and {write / 1e6:g} MB/s, a link of"
                f" {8 * link / 1e6:g} Mbit/s"
            )
            rows.append(
                Row(
                    case,
                    f"a step, the pick: {pick}",
                    "s",
                    took[pick],
                    peer=took[best],
                    peer_name=f"the fastest: {best}",
                    ratio=took[best] / took[pick],
                    goal=f"within {GOAL:.2f} x",
                    met=took[pick] <= GOAL * took[best],
                )
            )
            rows += [Row(case, f"a step, {way}", "s", took[way]) for way in WAYS]
            rows.append(
                Row(
                    case,
                    "a step of the pick, predicted",
                    "s",
                    answer.pick.result.seconds,
                    peer=took[pick],
                    peer_name="measured",
                    of_floor=answer.pick.result.seconds / took[pick],
                )
            )
            print(
                f"{case}: picked {pick}, predicted {answer.pick.result.seconds:.2f} s; "
                + ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items()),
                flush=True,
            )
    return Report("picked", rows)


def described(machine: Cluster, read: float, write: float, many: int, link: float) -> Cluster:
    own: dict[str, Any] = machine.hosts[0].model_dump(mode="json", by_alias=True)
    nics = [{"rate": rate(link * CARRIED)}]
    ssd = {
        "count": many,
        "read": rate(read),
        "write": rate(write),
        "mixed": 2,
        "depth": 1,
        "capacity": "600MB",
    }
    server = {
        "name": "server",
        "memory": "24GB",
        "memory_rate": "20GB/s",
        "updates": own["updates"],
        "sums": own["sums"],
        "nics": nics,
    }
    return make_cluster({"name": "lab", "hosts": [{**own, "nics": nics, "ssds": [ssd]}, server]})


def way_of(plan: Plan) -> str:
    """Return the name of the way that a plan uses."""
    if plan.placement.name == "files":
        return WAYS[0]
    return WAYS[1] if plan.memory.slots >= EVERY else WAYS[2]


def measured(way: str, home: Path, read: float, write: float, many: int, link: float) -> float:
    """Run the job and return the measured seconds of a step.

    Args:
        way: name of the way to run the job
        read: bytes/s of each SSD's reads
        write: bytes/s of each SSD's writes
        many: number of SSDs
        link: bytes/s of the link in each direction
    """
    words: dict[str, Any] = {**WORDS, "run.dir": str(home / "run" / str(time.monotonic_ns()))}
    with ExitStack() as stack:
        if way == WAYS[0]:
            devices = [
                stack.enter_context(LoopDevice(home / f"ssd{i}", 600 * MIB)) for i in range(many)
            ]
            limit = stack.enter_context(Throttle(devices, read, write))
            words["store.files"] = [str(Path(device.mount) / "store") for device in devices]
            found = workers([(subprocess.Popen, job_of(words))], home, 1, STEPS, limit)
        else:
            network = stack.enter_context(Network({name: [LabNic(link)] for name in ("w0", "s0")}))
            where = stack.enter_context(servers(network, 1, home, "--budget", "400MiB"))
            words |= {
                "servers.addresses": where,
                "budget.host": "400MiB",
                "servers.token_file": str(home / "token"),
                "servers.buffering": way.split()[1],
            }
            found = workers([(network.hosts["w0"].run, job_of(words))], home, 1, STEPS)
    return found[0].step_s
