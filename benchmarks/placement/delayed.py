"""Measure delayed updates (staleness 1): does training converge like synchronous training, and is
the time of the update hidden?

Convergence: the small job (examples/stdlib.toml) trains for 300 steps with staleness 0, with
staleness 1, and in plain torch. The mean of the last 20 training losses and the held-out loss are
compared.

Hiding: one worker trains with a server that has a throttled disk, which needs root. Writing the
state of a step takes 0.6 of a step without updates. The hidden fraction of the update is (step at
staleness 0 - step at staleness 1) / (step at staleness 0 - step without updates). Without updates,
a worker fetches fewer parameters, so the true hidden fraction may be larger than the result, but
not smaller.

Does NOT run on a GPU. Does NOT emulate a server with slow processors.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import roadtrain
from benchmarks.common import model420
from benchmarks.common.children import need_disk, run_child, serving
from benchmarks.common.report import Report, Row
from benchmarks.common.rows import row
from roadtrain.config.job import load_job
from roadtrain.errors import ConfigError, PeerError
from roadtrain.lab import LoopDevice, Throttle, lab_available
from roadtrain.servers import health
from roadtrain.training.build import build_model, build_optimizer
from roadtrain.training.placed_job import PlacedJob, place_job, step
from roadtrain.transport.address import address_of
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import MIB, show_rate

JOB = Path(roadtrain.__file__).parents[2] / "examples" / "stdlib.toml"
STEPS, TAIL, LOSS_GOAL = 300, 20, 0.01
WAYS = ("plain", "sync", "late")

LAYERS, WIDTH, INNER, ROWS, SEQ = 6, 512, 1536, 1, 768
# keep 4 of 6 blocks in the worker, no record in the server
WORKER_BUDGET, SERVER_BUDGET = "96MiB", "128MiB"
RECORD = 14  # bytes a parameter written by an update: the 16-bit copy, fp32 master and two moments
WARM_UP, TIMED = 3, 5
SHARE = 0.6  # time for writing, over the step without update
HIDDEN_GOAL = 0.9
STEPS_OF = {"none": "without update", "sync": "staleness 0", "late": "staleness 1"}


def run(quick: bool = False) -> Report:
    if not JOB.exists():
        raise ConfigError(
            f"{JOB} does not exist", hint="run from a checkout, which has the example job"
        )
    rows = converges(12 if quick else STEPS, 4 if quick else TAIL, small=quick)
    if (why := lab_available()) is None:
        rows += hides(quick)
    else:
        print(
            f"no slow device can be emulated here ({why}); the hiding of the update is"
            " not measured",
            flush=True,
        )
    return Report("delayed", rows)


# does it converge?


def converges(steps: int, tail: int, small: bool) -> list[Row]:
    found = {}
    for way in WAYS:
        found[way] = run_child(train, echo=True, way=way, steps=steps, small=small)
        print(
            f"{way}: loss {fmean(found[way]['losses'][-tail:]):.4f}, held out"
            f" {found[way]['held_out']:.4f}, {fmean(found[way]['seconds']):.2f} s a step",
            flush=True,
        )
    sync, late, plain = found["sync"], found["late"], found["plain"]
    case = (
        f"{JOB.name}, {steps} steps of {sync['tokens']} bytes of"
        f" text{', a smaller model' if small else ''}"
    )
    rows = []
    for metric, value in (
        (f"training loss, mean of the last {tail} steps", lambda of: fmean(of["losses"][-tail:])),
        ("held-out loss", lambda of: of["held_out"]),
    ):
        difference = value(late) / value(sync) - 1
        goal, met = f"within {100 * LOSS_GOAL:g}", abs(difference) <= LOSS_GOAL
        of_sync, of_plain = (value(sync), "staleness 0"), (value(plain), "plain torch")
        rows += [
            Row(case, f"{metric}, staleness 1", "nats", value(late), *of_sync),
            Row(case, f"{metric}, staleness 0", "nats", value(sync), *of_plain),
            Row(
                case,
                f"{metric}: staleness 1 against 0",
                "%",
                100 * difference,
                goal=goal,
                met=met,
            ),
        ]
    peer = (fmean(plain["seconds"]), "plain torch")
    for staleness, result in enumerate((sync, late)):
        metric = f"step, state in RAM, staleness {staleness}"
        rows.append(row(case, metric, "s", fmean(result["seconds"]), peer))
    return rows


def train(way: str, steps: int, small: bool) -> dict[str, Any]:
    """Train the small job in this process. `way`: "plain" (plain torch), "sync" (staleness 0) or
    "late" (staleness 1).
    """
    with tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as home:
        job = load_job(
            str(JOB),
            {
                "run.dir": home,
                "store.files": [],
                "budget.host": "4GiB",
                "run.device": "cpu",
                "optimizer.delay": int(way == "late"),
            },
        )
        if small:
            job = job.changed({"data.seq_len": 32, "model.config.num_hidden_layers": 2})
        with ExitStack() as stack:
            training = place_job(job, lambda _: None)
            stack.callback(training.optimizer.close)
            if way == "plain":
                training = plain_torch(training)
                stack.close()
            losses, seconds, begin = [], [], time.perf_counter()
            for number in range(steps):
                losses.append(step(training, number)[0])
                seconds.append(time.perf_counter() - begin)
                begin += seconds[-1]
                if number + 1 in (3, 10) or (number + 1) % 50 == 0:
                    print(
                        f"{way}: step {number + 1} of {steps}, loss {losses[-1]:.3f}, about "
                        f"{fmean(seconds) * (steps - number - 1):.0f} s to go",
                        flush=True,
                    )
            held_out = training.held_out_loss()
    tokens = job.data.batch_size * job.data.seq_len * job.optimizer.accumulate
    return {"losses": losses, "seconds": seconds, "held_out": held_out, "tokens": tokens}


def plain_torch(placed: PlacedJob) -> PlacedJob:
    """Build the same job as `placed` in plain torch, with the same initial values."""
    model = build_model(placed.job, "cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(placed.optimizer.read(name)))
    return PlacedJob(
        placed.job,
        model,
        build_optimizer(placed.job, model.parameters()),
        placed.scaler,
        placed.tokens,
        placed.device,
    )


# does it hide the update?


def hides(quick: bool) -> list[Row]:
    layers, seq, timed = (2, 64, 2) if quick else (LAYERS, SEQ, TIMED)
    found: dict[str, dict[str, Any]] = {}
    rate = 0.0
    for way in STEPS_OF:
        with tempfile.TemporaryDirectory(prefix="roadtrain-bench-", dir=Path.cwd()) as name:
            need_disk(Path(name), 2 * 10**9)
            with LoopDevice(Path(name) / "ssd", 1536 * MIB) as device:
                result = found[way] = run_child(
                    train_beside,
                    way=way,
                    layers=layers,
                    seq=seq,
                    steps=timed,
                    directory=device.mount,
                    device=device.major_minor,
                    rate=rate,
                )
        if way == "none":
            rate = RECORD * result["parameters"] / (SHARE * result["step_s"])
        print(f"slow server, {way}: {result['step_s']:.2f} s a step", flush=True)
    none, sync, late = found["none"], found["sync"], found["late"]
    case = (
        f"one worker, {none['parameters'] / 1e6:.1f} M parameters, {seq} bytes of text, a server"
        f" with a device of {show_rate(rate)} each way"
    )
    exposed, left = sync["step_s"] - none["step_s"], late["step_s"] - none["step_s"]
    peer, hidden = (none["step_s"], "without update"), "of it, hidden at staleness 1"
    rows = [
        row(case, "step, staleness 0", "s", sync["step_s"], peer),
        row(case, "step, staleness 1", "s", late["step_s"], peer),
        Row(case, "the update that staleness 0 waits for", "s", exposed),
        row(case, hidden, "", 1 - left / exposed, goal=f"ours >= {HIDDEN_GOAL:g}"),
    ]
    for stage in sorted({*none["stages"], *sync["stages"], *late["stages"]}):
        for way, result in found.items():
            seconds = result["stages"].get(stage, 0.0)
            rows.append(Row(f"{stage}, a step", STEPS_OF[way], "s", seconds))
    return rows


def train_beside(
    way: str, layers: int, seq: int, steps: int, directory: str, device: str, rate: float
) -> dict[str, Any]:
    """Train three steps to warm up and then `steps` measured steps, with a server in a child
    process.

    Args:
        way: "none" (without updates), "sync" (staleness 0) or "late" (staleness 1)
        layers: layers of the model
        seq: bytes of text in a step
        steps: number of measured steps
        directory: folder of the server's store, on a device of its own
        device: MAJ:MIN of this device
        rate: the device's limit in bytes/s each way; 0: unlimited
    """
    torch.set_num_threads(1)
    compute = model420.compute_default()
    with ExitStack() as stack:
        if rate:  # of this process, too, which does not use the device
            throttle = stack.enter_context(Throttle([device], rate, rate))
            throttle.enter_process(os.getpid())
        words = ("--store", str(Path(directory, "store")), "--budget", SERVER_BUDGET)
        server = stack.enter_context(serving(Path(directory), *words))
        model = model420.build(compute, layers=layers, width=WIDTH, inner=INNER)
        optimizer = stack.enter_context(
            roadtrain.place(
                model,
                model420.adamw(model.parameters()),
                store=roadtrain.Servers([server.address], retry_s=60),
                host_budget=WORKER_BUDGET,
                delay=roadtrain.Delay(1) if way == "late" else None,
                device="cpu",
                chunk_elements=1 << 19,
            )
        )
        forward = backward = 0.0
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                optimizer.stages()
                before = served_s(server.address)
                begin, forward, backward = time.perf_counter(), 0.0, 0.0
            x = model420.batch(number, ROWS, seq)
            t0 = time.perf_counter()
            loss = model(input_ids=x, labels=x).loss
            t1 = time.perf_counter()
            loss.backward()
            forward, backward = forward + t1 - t0, backward + time.perf_counter() - t1
            if way != "none":
                optimizer.step()
            optimizer.zero_grad()
        total = time.perf_counter() - begin
        stages = {name: stage.seconds for name, stage in optimizer.stages().items()}
        stages |= {"Forward": forward, "Backward": backward}
        for name, seconds in served_s(server.address).items():
            stages[f"{name} (server)"] = seconds - before.get(name, 0.0)
    return {
        "step_s": total / steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stages": {name: seconds / steps for name, seconds in stages.items()},
    }


def served_s(address: str) -> dict[str, float]:
    """Ask a server for the seconds of each stage of its work so far, summed over its threads."""
    status = health.ask(address_of(address), TcpOptions())
    if isinstance(status, PeerError):
        raise status
    return dict(status[2])
