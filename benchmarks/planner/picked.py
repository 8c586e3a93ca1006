"""Check that the planner picks a fast way to run a job. On five small clusters, chosen before any
run, every way to run the job is measured and compared with the planner's pick.

Each cluster has one worker host with SSDs (throttled loop devices), and one host without SSDs
behind an emulated link. The planner gets the rates of the SSDs and of the link, and the speed of
this machine. The ways are: state in files; state on the server, with all blocks kept from forward
to backward; and state on the server, with as few blocks as possible kept. The goal is that a step
of the pick takes at most 1.10 times as long as a step of the fastest way. Needs root.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from benchmarks.planner.reality import Case, calibrated, job_of, lab_cluster, measured
from roadtrain.config.models import from_config
from roadtrain.config.plan_file import Plan
from roadtrain.errors import ConfigError
from roadtrain.lab import lab_available, network_available
from roadtrain.planner.calibrate import EXACT
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.search import search

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
            cluster = lab_cluster(
                "lab", machine, ssds=many, rates=(read, write), link=link, servers=1
            )
            answer = search(
                cluster, shape, EXACT, batch=1, placements=("files", "server"), explain=False
            )
            assert answer.pick is not None
            pick, predicted = way_of(answer.pick.plan), answer.pick.result.seconds
            cases = [Case(WAYS[0], "files", (read, write), many)] + [
                Case(way, "server", (link,), words=(("servers.buffering", way.split()[1]),))
                for way in WAYS[1:]
            ]
            took = {case.name: measured(case, home, 1, WORDS)[0].step_s for case in cases}
            best = min(took, key=lambda way: took[way])
            case = (
                f"{many} device(s) of {read / 1e6:g} and {write / 1e6:g} MB/s, a link of"
                f" {8 * link / 1e6:g} Mbit/s"
            )
            fastest = (took[best], f"the fastest: {best}")
            picked = row(case, f"a step, the pick: {pick}", "s", took[pick], fastest)
            met = took[pick] <= GOAL * took[best]
            rows.append(replace(picked, goal=f"within {GOAL:.2f} x", met=met))
            rows += [Row(case, f"a step, {way}", "s", took[way]) for way in WAYS]
            real, of_floor = (took[pick], "measured"), predicted / took[pick]
            metric = "a step of the pick, predicted"
            rows.append(row(case, metric, "s", predicted, real, of_floor=of_floor))
            print(
                f"{case}: picked {pick}, predicted {predicted:.2f} s; "
                + ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items()),
                flush=True,
            )
    return Report("picked", rows)


def way_of(plan: Plan) -> str:
    """Return the name of the way that a plan uses."""
    if plan.placement.name == "files":
        return WAYS[0]
    return WAYS[1] if plan.memory.slots >= EVERY else WAYS[2]
