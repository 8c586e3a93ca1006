"""`roadtrain soak`: scripted faults of a small job with real processes, sockets and files. The job
has two servers and two workers, or it is one trainer with a store of its own.

Each fault must have one of two outcomes. Outcome 1: the run goes on within ten seconds of the
restart, its losses are bit for bit the losses of a run without faults, and no committed step is
repeated. Outcome 2, after a mistake of the user or a failing disk: the run ends with an error that
names the cause, and goes on when the cause is repaired. In both cases, the final state is equal to
that of a run without faults. Every process that ends by itself prints an error, which names the
file, or the role, the host, and the step or the expected event. No process hangs. Fault K of a seed
is always the same fault, and can be run alone.

To add a kind of fault, write a function of a Scene and a Fault with the decorator `@kind`, and give
the kind a place in CYCLE. Does NOT emulate lost packets or latency.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.report import machine
from benchmarks.soak import alone as soak_alone
from benchmarks.soak import servers as soak_servers  # noqa: F401  registers its kinds
from benchmarks.soak import sums as soak_sums
from benchmarks.soak.fault import (
    ALONE,
    KINDS,
    Fault,
    NothingToStrike,
    Outcome,
    Reference,
    bytes_until,
    kill,
    kind,
    refused,
    strike_at,
    supervised,
)
from benchmarks.soak.job import FLAVOURS
from benchmarks.soak.scene import FORK, SERVERS, STEPS, WORKERS, Hung, Scene, Wrong, fill
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.bad_link import Way

RECOVERY_S = 10.0  # limit from the restart to the first new step
HARD_S = 90.0  # a fault that takes longer hangs
SHORT_S = 3.0  # the job's deadline in faults that wait for it
RATE = 20e6  # bytes/s of a slowed link
LEFT = 64 << 10  # bytes that are left on a full disk
HOWS = ("went on", "sentence", "failed", "hung", "skipped")  # outcomes
# role and host; a relay has a socket
WHO = re.compile(r"(server|worker) \d \((127\.0\.0\.1:\d+|/)")
# the step, or the expected event
WHAT = re.compile(
    r"step \d|wait(ed|ing) (\d+ s )?for|refused|(another|different) model|asked for|requested"
)


# all kinds, in the order of a seed's faults; kinds that can strike at many moments are repeated
CYCLE = (
    "worker killed",
    "server killed",
    "link cut",
    "power cut",
    "bit flipped on a link",
    "all killed",
    "server moved",
    "device fails",
    "another model",
    "killed and power cut",
    "disk full",
    "server's power cut",
    "killed twice",
    "second trainer",
    "link slowed",
    "flipped bit",
    "wrong token",
    "worker killed",
    "store copied",
    "server killed",
    "bit flipped on a link",
    "server's bit flipped",
    "link cut",
    "run directory full",
    "process stopped",
    "power cut",
    "disk full at the start",
    "stale replica",
    "another dtype",
    "killed and power cut",
    "link stalled",
    "store unmounted",
    "state outgrows the disk",
    "server's device fails",
    "server killed",
    "second servers",
    "flipped bit",
    "relay killed",
    "server unmounted",
    "server's power cut",
    "histories mixed",
    "killed and power cut",
    "store swapped",
    "workers stop apart",
)


def drawn(seed: int, number: int) -> Fault:
    """Choose fault `number` of a seed. The same arguments always give the same fault."""
    name, rng = CYCLE[number % len(CYCLE)], random.Random(f"{seed}/{number}")
    link = rng.randrange(WORKERS), rng.randrange(SERVERS)
    workers, servers = (
        [f"{role} {i}" for i in range(n)] for role, n in (("worker", WORKERS), ("server", SERVERS))
    )
    if name == "all killed":
        victims = rng.choice([workers, servers, workers + servers, workers + servers])
    elif name in ("killed twice", "process stopped"):
        victims = rng.sample(workers + servers, 2 if name == "killed twice" else 1)
    elif name.startswith(("server", "stale", "second servers")):
        victims = [rng.choice(servers)]
    elif name.startswith("relay"):
        victims, link = ["relay of worker 0"], (0, link[1])
    elif name.startswith(("disk", "state")):
        victims = ["server 0" if name.startswith("state") else rng.choice(servers)]
    elif name.startswith(("link", "bit")):
        victims = [f"worker {link[0]}", f"server {link[1]}"]
    else:
        victims = [rng.choice(workers)]
    way: Way = rng.choice(("there", "back"))
    flavour = rng.choice(list(FLAVOURS))
    if KINDS[name].alone:
        victims, flavour = ["trainer"], KINDS[name].alone
    return Fault(
        number,
        name,
        tuple(victims),
        flavour,
        link,
        way,
        rng.uniform(0, 0.9),
        rng.random() < 0.5,
        rng.randrange(1 << 16),
    )


# the kinds


def start_until(
    scene: Scene, fault: Fault, reference: Reference, first: float = 0.0, **options: Any
) -> None:
    """Start the run and return at the moment of the fault. `first`: of `strike_at`. `options`: of
    the start.
    """
    scene.start(**options)
    strike_at(scene, fault, reference, lambda: None, first)
    scene.wait_struck()


@kind("worker killed")
@kind("server killed")
@kind("all killed")
def killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims))
    return supervised(scene, fault)


@kind("killed twice")
def killed_twice(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Kill a process, and a second process while the job recovers or soon after. Returns the errors
    of the processes.
    """
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims[:1]))
    sentences = supervised(scene, fault, last=False)
    scene.struck.clear()
    scene.start()
    link = scene.links[fault.link]
    link.at(
        link.nbytes[fault.way] + fault.choice % 40_000,
        fault.way,
        lambda: kill(scene, fault.victims[1:]),
    )
    sentences += scene.wait_workers()
    if not all(w.process.exitcode == 0 for w in scene.workers):
        scene.finish()
    return sentences


@kind("relay killed")
def relay_killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Kill the relay that communicates for both workers. Returns the errors of the processes."""
    # The relay's links carry less than half of the bytes of the workers' own links, so the fault
    # happens after a third of the bytes.

    def kill() -> None:
        for child in psutil.Process(scene.workers[0].process.pid).children():
            child.kill()

    scene.relay = True
    scene.start()
    strike_at(scene, replace(fault, moment=fault.moment / 3), reference, kill)
    return supervised(scene, fault)


@kind("workers stop apart")
def stop_apart(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Let one worker ask to stop. All workers must end after the same step, without an error.
    Returns an empty list.
    """
    stops = {rank: {"stops_at": 1 << 30} for rank in range(WORKERS)}
    stops[int(fault.victims[0][-1])]["stops_at"] = 1 + fault.choice % (STEPS - 2)
    scene.finish(wrong=stops)
    last = [max(step for _, step in log.steps) for log in scene.logs()]
    if len(set(last)) > 1:
        raise Wrong(f"workers did not stop after the same step, but after steps {last}")
    scene.finish()
    return []


@kind("server moved")
def moved(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Restart a killed server with the same store on another address. Returns the errors of the
    processes.
    """
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims))
    scene.wait_struck()
    sentences = scene.wait_workers()
    before = time.monotonic()
    scene.serve(int(fault.victims[0][-1]), moved=True)
    scene.start()
    scene.restarted = before
    scene.finished()
    return sentences


@kind("link cut")
def cut(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Cut the link after an exact number of bytes, most likely inside a frame. Returns the errors
    of the processes.
    """
    scene.start()
    link = scene.links[fault.link]
    link.cut(max(1, bytes_until(scene, fault, reference)), fault.way)
    sentences = scene.wait_workers()
    if not sentences:
        raise Wrong(f"no process noticed that the link was cut (at monotonic time {link.cut_at})")
    scene.struck_at = link.cut_at
    scene.finish()
    return sentences


@kind("link slowed")
def slowed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    start_until(scene, fault, reference)
    scene.links[fault.link].set_rate(RATE / 10)
    scene.finished()
    return []


@kind("link stalled")
def stalled(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Stop all traffic of a link without closing it, so that only a deadline detects this fault.
    Returns the errors of the processes.
    """
    start_until(scene, fault, reference, deadline_s=SHORT_S)
    scene.links[fault.link].stall()
    sentences = scene.wait_workers()
    scene.links[fault.link].resume()
    scene.finish()
    return sentences


@kind("process stopped")
def stopped(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Stop a process with SIGSTOP until the other processes have ended, and then kill or continue
    the process. Returns the errors of the processes.
    """
    (victim,) = fault.victims
    scene.start(deadline_s=SHORT_S)
    role, _, number = victim.partition(" ")
    node = (scene.workers if role == "worker" else scene.servers)[int(number)]
    strike_at(scene, fault, reference, lambda: node.send(signal.SIGSTOP))
    scene.wait_struck()
    others = [w for w in scene.workers if w is not node]
    for other in others:
        scene.join(other, "the end of a worker whose peer was stopped")
    if role == "worker" or fault.choice % 2:
        node.kill()  # SIGKILL also ends a stopped process
        node.process.join()
    else:
        node.send(signal.SIGCONT)
    sentences = scene.wait_workers()
    scene.finish()
    return sentences


@kind("disk full", mounts=True)
def full(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Fill the disk during training, which must go on. Returns an empty list."""
    disk = scene.disk(int(fault.victims[0][-1]))
    start_until(scene, fault, reference, first=0.5)
    fill(disk, LEFT)
    scene.finished()
    return []


@kind("disk full at the start", ends="sentence", mounts=True)
def full_at_first(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    disk = scene.disk(int(fault.victims[0][-1]))
    ballast = fill(disk, LEFT)
    scene.start()
    sentences = refused(scene, rf"{disk}.* are free")
    ballast.unlink()
    scene.finish()
    return sentences


@kind("state outgrows the disk", ends="sentence", mounts=True)
def outgrown(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Let the state that the job commits outgrow the disk. The last step that fits must stay
    committed. Returns the errors of the processes.
    """
    disk, at = scene.disk(0), 1 + fault.choice % (STEPS - 2)
    scene.finish(steps=at)
    ballast = fill(disk, LEFT)
    scene.start(wrong={rank: {"grows_at": at} for rank in range(WORKERS)})
    sentences = refused(scene, rf"{disk}.*record of step \d+.* are free")
    ballast.unlink()
    scene.finish()
    return sentences


@kind("another model", ends="sentence")
@kind("another dtype", ends="sentence")
@kind("wrong token", ends="sentence")
def foreign(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Start one worker with another model, dtype or token than the other workers, at the first
    start or (if `fault.prompt`) later. Returns the errors of the processes.
    """
    change = fault.kind.rpartition(" ")[2]
    rank = int(fault.victims[0][-1])
    # worker 0 alone decides the content of a new store
    if fault.prompt or (rank == 0 and change != "token"):
        scene.finish(steps=1 + fault.choice % (STEPS - 2))
    scene.start(deadline_s=SHORT_S, wrong={rank: {"change": change}})
    sentences = refused(
        scene,
        "the token does not match" if change == "token" else "(another|different) model|dtype",
    )
    scene.finish()
    return sentences


# the run


def play(fault: Fault, references: dict[str, Reference]) -> Outcome:
    """Run one fault until its last process has ended. `references`: maps each flavor of the job to
    a run without faults.
    """
    of = KINDS[fault.kind]
    if (of.mounts and (why := no_disks())) or (of.alone and (why := no_llama())):
        return Outcome(fault, "skipped", why=why)
    reference = references[fault.flavour]
    begin = time.monotonic()
    rate = RATE if fault.kind == "link slowed" else float("inf")
    with (
        soak_alone.AloneScene(fault.flavour, HARD_S)
        if of.alone
        else Scene(fault.flavour, HARD_S, rate)
    ) as scene:
        sentences: list[str] = []
        try:
            try:
                sentences = of.play(scene, fault, reference)
            except NothingToStrike:
                of = replace(of, ends="any")
            scene.check(reference.logs)
            _check_sentences(scene, sentences)
            recovery = scene.recovery_s() if scene.attempt else None
            if recovery is not None and recovery > RECOVERY_S:
                raise Wrong(
                    f"the first new step took {recovery:.1f} s after the restart,"
                    f" {RECOVERY_S:.0f} s are allowed"
                )
            how, why = of.ends if of.ends != "any" else "sentence" if sentences else "went on", ""
        except Hung as error:
            how, why, recovery = "hung", str(error), None
        except Wrong as error:
            how, why, recovery = (
                "failed",
                str(error),
                scene.recovery_s() if scene.attempt > 0 else None,
            )
        return Outcome(
            fault, how, tuple(sentences), recovery, scene.lasted_s(), time.monotonic() - begin, why
        )


def _check_sentences(scene: Scene, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        if isinstance(scene, soak_alone.AloneScene):
            if str(scene.home) not in sentence:
                raise Wrong(f"an error message does not name a file or directory: {sentence}")
        elif not WHO.search(sentence) or not WHAT.search(sentence):
            raise Wrong(
                "an error message must name the role, the host, and the step or the expected event:"
                f" {sentence}"
            )


def undisturbed(flavour: str) -> Reference:
    if flavour == ALONE:
        return _undisturbed_alone(flavour)
    with Scene(flavour, HARD_S) as scene:
        scene.finish()
        logs = tuple(scene.logs())
        if any(len(log.steps) != STEPS for log in logs):
            raise Wrong(f"the run without faults did not train {STEPS} steps: {logs}")
        return Reference(
            logs, {link: dict(relay.nbytes) for link, relay in scene.links.items()}, {}
        )


def _undisturbed_alone(flavour: str) -> Reference:
    with soak_alone.AloneScene(flavour, HARD_S) as scene:
        scene.finish()
        (log,) = scene.logs()
        calls = re.search(
            r"^0 calls (\d+) (\d+) (\d+)$", text := scene.log(0).read_text(), re.MULTILINE
        )
        if len(log.steps) != STEPS or not log.end or calls is None:
            raise Wrong(f"the trainer without faults did not train {STEPS} steps: {text}")
        return Reference(
            (log,), {}, dict(zip(("sync", "write", "ledger"), map(int, calls.groups())))
        )


def no_llama() -> str:
    """Return the reason why faults of a trainer that runs alone cannot be tested on this machine,
    or "".
    """
    return (
        ""
        if find_spec("transformers")
        else "transformers is not installed (pip install 'roadtrain[hf]')"
    )


def no_disks() -> str:
    """Return the reason why small file systems cannot be mounted on this machine, or ""."""
    try:
        with Scene("plain", HARD_S) as scene:
            scene.disk(0)
    except RoadtrainError as error:
        return str(error)
    return ""


def soak(
    numbers: Sequence[int],
    seed: int,
    say: Callable[[str], None] = print,
    keep: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run the faults of a seed with the given numbers, and return their outcomes. `keep` is called
    with each outcome.
    """
    faults = [drawn(seed, number) for number in numbers]
    flavours = {fault.flavour for fault in faults if fault.flavour in FLAVOURS or not no_llama()}
    references = {flavour: undisturbed(flavour) for flavour in sorted(flavours)}
    out = []
    for fault in faults:
        out.append(play(fault, references))
        end = out[-1]
        extra = f", back in {end.recovery_s:.1f} s" if end.recovery_s is not None else ""
        say(f"{fault}: {end.how}{extra} ({end.seconds:.1f} s)")
        if end.why:
            say(end.why)
        if keep is not None:
            keep(end)
    return out


def table(ends: Sequence[Outcome]) -> list[str]:
    """Format outcomes as the lines of a table, with a row for each kind of fault and a row for all
    faults.
    """
    columns = ("count", *HOWS, "worst recovery s", "worst end s")

    def line(name: str, cells: Sequence[str]) -> str:
        widths = [max(9, len(column) + 2) for column in columns]
        return f"{name:26}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))

    def worst(seconds: list[float | None]) -> str:
        measured = [value for value in seconds if value is not None]
        return f"{max(measured):.1f}" if measured else ""

    lines = [line("kind", columns)]
    kinds = [name for name in KINDS if any(end.fault.kind == name for end in ends)]
    for name in [*kinds, "all"]:
        these = [end for end in ends if name in (end.fault.kind, "all")]
        counts = Counter(end.how for end in these)
        cells = [str(counts[how] or ("0" if how == "hung" else "")) for how in HOWS]
        times = [worst([e.recovery_s for e in these]), worst([e.lasted_s for e in these])]
        lines.append(line(name, [str(len(these)), *cells, *times]))
    return lines


def command(
    faults: int | None = None,
    seed: int = 0,
    only: str | None = None,
    json: str | None = None,
    sums: bool = False,
) -> int:
    """Run scripted faults (kills, power cuts, flipped bits, cut links, full disks, wrong workers)
    of a small job on this machine. The exit code is 1 if a process hangs or a loss differs.

    Other reasons for exit code 1 are a wrong sum, and a process that ended without an error
    message.

    Args:
        faults: number of faults (300)
        sums: run faults of a summation's spare hosts instead (100)
        seed: seed of the faults (0)
        only: number of a single fault to run, or FIRST-LAST for several
        json: also write every fault to this file; with --only, add to its content
    """
    if faults is not None and faults < 1:
        raise ConfigError(
            f"--faults must be at least 1, not {faults}", hint="for example --faults 300"
        )
    if sums:
        if only is not None:
            raise ConfigError(
                "--sums and --only cannot be used together",
                hint="with --sums, choose the number of faults with --faults",
            )
        return soak_sums.command(faults or 100, seed, json)
    # not at import: a process has one fork server, and tests import this module
    FORK.set_forkserver_preload(["benchmarks.soak.warm"])
    faults = faults or 300
    numbers = list(range(faults)) if only is None else _numbers(only)
    print(f"soak: {len(numbers)} faults of seed {seed}; {machine()}")
    path = Path(json) if json is not None else None
    if path is not None and only is None:
        path.unlink(missing_ok=True)
    ends = soak(numbers, seed, keep=None if path is None else lambda end: keep_end(path, end, seed))
    print("", *table(ends), sep="\n")
    for why in sorted({end.why for end in ends if end.how == "skipped"}):
        print(f"skipped: {why}")
    return int(any(end.how in ("failed", "hung") for end in ends))


def _numbers(text: str) -> list[int]:
    """Parse numbers of faults, such as `7` or `50-99`. Raises ConfigError for any other text."""
    first, _, last = text.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise ConfigError(
            f"--only {text!r} is not a fault's number, and not FIRST-LAST",
            hint="for example --only 7 or --only 50-99",
        )
    return list(range(int(first), int(last or first) + 1))


def keep_end(path: Path, end: Outcome, seed: int) -> None:
    """Add an outcome to a file that keeps the earlier outcomes of the same seed."""
    rows: dict[int, Any] = {}
    if path.exists() and (held := loads(path.read_text()))["seed"] == seed:
        rows = {row["fault"]["number"]: row for row in held["faults"]}
    rows[end.fault.number] = asdict(end)
    ordered = [rows[number] for number in sorted(rows)]
    whole = [Outcome(**row | {"fault": Fault(**row["fault"])}) for row in ordered]
    body = {
        "name": "soak",
        "machine": machine(),
        "date": date.today().isoformat(),
        "seed": seed,
        "table": table(whole),
        "faults": ordered,
    }
    path.write_text(dumps(body, indent=1) + "\n")
