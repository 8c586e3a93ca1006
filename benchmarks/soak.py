"""`roadtrain soak`: scripted faults against a small job of two servers and two workers, or against
one trainer with a store of its own: real processes, real sockets, real files.

Each fault must end in one of two ways: the run goes on, with the losses of a run that nothing
happened to, bit for bit, no committed step repeated, within RECOVERY_S of the restart; or, where a
person made a mistake or a device failed, with a sentence that says which, and the run goes on once
that is mended. At the end the state is that of the undisturbed run, and there is one history.
Whatever ends by itself says a sentence with role, host, and the step or what was expected, or with
the file. Nothing hangs. Fault K of a seed is always the same fault, and can be run alone.

A new kind is a function of a Scene and a Fault under `@kind` (soak_alone.py, soak_servers.py,
here), and a place in CYCLE. Does NOT emulate lost packets or latency.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.util import find_spec
from json import dumps, loads
from pathlib import Path
from typing import Any

import psutil

from benchmarks import soak_alone, soak_servers, soak_sums  # noqa: F401  its kinds
from benchmarks.report import machine
from benchmarks.soak_fault import (
    ALONE,
    KINDS,
    TRAINER,
    Ended,
    Fault,
    Nothing,
    Reference,
    kill,
    kind,
    refused,
    strike_at,
    supervised,
)
from benchmarks.soak_job import FLAVOURS
from benchmarks.soak_scene import SERVERS, STEPS, WORKERS, Hung, Scene, Wrong
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.bad_link import Way

RECOVERY_S = 10.0  # from the restart to the first new step
HARD_S = 90.0  # a fault that is not over by then hangs
SHORT_S = 3.0  # the job's own deadline where passing it is the point
RATE = 20e6  # bytes a second, of a link that is slowed
LEFT = 64 << 10  # bytes that a full disk has
WHO = re.compile(r"(server|worker) \d \((127\.0\.0\.1:\d+|/)")  # role and host; a relay's socket
# the step, what was expected
WHAT = re.compile(
    r"step \d|wait(ed|ing) (\d+ s )?for|refused|(another|different) model|asked for|requested"
)


CYCLE = (  # every kind is among any so many faults; a kind that has many moments comes more often
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
    "Trainer killed",
    "store swapped",
    "workers stop apart",
)


def drawn(seed: int, number: int) -> Fault:
    """Fault `number` of a seed."""
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


@kind("worker killed")
@kind("server killed")
@kind("all killed")
def killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims))
    return supervised(scene, fault)


@kind("killed twice")
def killed_twice(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """And once more while it recovers, or soon after."""
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims[:1]))
    said = supervised(scene, fault, last=False)
    scene.struck.clear()
    scene.start()
    link = scene.links[fault.link]
    link.at(
        link.nbytes[fault.way] + fault.choice % 40_000,
        fault.way,
        lambda: kill(scene, fault.victims[1:]),
    )
    said += scene.wait_workers()
    if not all(w.process.exitcode == 0 for w in scene.workers):
        scene.finish()
    return said


@kind("relay killed")
def relay_killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """The process that communicates for both workers. Its links carry less than half of what
    the workers' do."""

    def kill() -> None:
        for child in psutil.Process(scene.workers[0].process.pid).children():
            child.kill()

    scene.relay = True
    scene.start()
    strike_at(scene, replace(fault, moment=fault.moment / 3), reference, kill)
    return supervised(scene, fault)


@kind("workers stop apart")
def stop_apart(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """One worker's time is over, or it is interrupted: all end after the same step, in order."""
    stops = {rank: {"stops_at": 1 << 30} for rank in range(WORKERS)}
    stops[int(fault.victims[0][-1])]["stops_at"] = 1 + fault.choice % (STEPS - 2)
    scene.start(wrong=stops)
    scene.finished()
    last = [max(step for _, step in told.steps) for told in scene.told()]
    if len(set(last)) > 1:
        raise Wrong(f"workers end after steps {last}")
    scene.finish()
    return []


@kind("server moved")
def moved(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Killed, and started again on another address with the same store; the workers are given
    the new one."""
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, fault.victims))
    scene.wait_struck()
    said = scene.wait_workers()
    before = time.monotonic()
    scene.serve(int(fault.victims[0][-1]), moved=True)
    scene.start()
    scene.restarted = before
    scene.finished()
    return said


@kind("link cut")
def cut(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """After exactly so many bytes, most likely in the middle of a frame."""
    scene.start()
    link, moment = (
        scene.links[fault.link],
        int(fault.moment * reference.nbytes[fault.link][fault.way]),
    )
    link.cut(max(1, moment - link.nbytes[fault.way]), fault.way)
    said = scene.wait_workers()
    if not said:
        raise Wrong(f"nobody noticed that the link was cut (at {link.cut_at})")
    scene.struck_at = link.cut_at
    scene.finish()
    return said


@kind("link slowed")
def slowed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    scene.start()
    strike_at(scene, fault, reference, lambda: None)
    scene.wait_struck()
    scene.links[fault.link].set_rate(RATE / 10)
    scene.finished()
    return []


@kind("link stalled")
def stalled(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Nothing passes and nobody hangs up: the deadline is all there is."""
    scene.start(deadline_s=SHORT_S)
    strike_at(scene, fault, reference, lambda: None)
    scene.wait_struck()
    scene.links[fault.link].stall()
    said = scene.wait_workers()
    scene.links[fault.link].resume()
    scene.finish()
    return said


@kind("process stopped")
def stopped(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """SIGSTOP: it is there and does nothing. Afterwards it is killed, or goes on and finds the
    others gone."""
    (victim,) = fault.victims
    scene.start(deadline_s=SHORT_S)
    role, _, number = victim.partition(" ")
    node = (scene.workers if role == "worker" else scene.servers)[int(number)]
    strike_at(scene, fault, reference, lambda: node.send(signal.SIGSTOP))
    scene.wait_struck()
    others = [w for w in scene.workers if w is not node]
    for other in others:
        other.process.join(max(0.0, scene.until - time.monotonic()))
        if not other.ended:
            scene.hung("a worker to end whose peer was stopped")
    if role == "worker" or fault.choice % 2:
        node.kill()  # which ends a stopped process too
        node.process.join()
    else:
        node.send(signal.SIGCONT)
    said = scene.wait_workers()
    scene.finish()
    return said


@kind("disk full", mounts=True)
def full(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """While it trains: all that a step needs was allocated when the store was made."""
    disk = scene.disk(int(fault.victims[0][-1]))
    scene.start()
    strike_at(scene, fault, reference, lambda: None, first=0.5)
    scene.wait_struck()
    _fill(disk)
    scene.finished()
    return []


@kind("disk full at the start", ends="sentence", mounts=True)
def full_at_first(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    disk = scene.disk(int(fault.victims[0][-1]))
    ballast = _fill(disk)
    scene.start()
    said = refused(scene, rf"{disk}.* are free")
    ballast.unlink()
    scene.finish()
    return said


@kind("state outgrows the disk", ends="sentence", mounts=True)
def outgrown(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """What the job commits with a step no longer fits: the step before it stays."""
    disk, at = scene.disk(0), 1 + fault.choice % (STEPS - 2)
    scene.start(steps=at)
    scene.finished()
    ballast = _fill(disk)
    scene.start(wrong={rank: {"grows_at": at} for rank in range(WORKERS)})
    said = refused(scene, rf"{disk}.*record of step \d+.* are free")
    ballast.unlink()
    scene.finish()
    return said


@kind("another model", ends="sentence")
@kind("another dtype", ends="sentence")
@kind("wrong token", ends="sentence")
def foreign(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """One worker is not like the others, at the first start or, if `prompt`, at a later one."""
    change = fault.kind.rpartition(" ")[2]
    rank = int(fault.victims[0][-1])
    # worker 0 alone says what a new store holds
    if fault.prompt or (rank == 0 and change != "token"):
        scene.start(steps=1 + fault.choice % (STEPS - 2))
        scene.finished()
    scene.start(deadline_s=SHORT_S, wrong={rank: {"change": change}})
    said = refused(
        scene,
        "the token does not match" if change == "token" else "(another|different) model|dtype",
    )
    scene.finish()
    return said


def _fill(disk: Path) -> Path:
    free = os.statvfs(disk)
    with open(disk / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(0, free.f_bavail * free.f_frsize - LEFT))
    return disk / "ballast"


# the run


def play(fault: Fault, references: dict[str, Reference]) -> Ended:
    """One fault, from the start of its processes to the end of the last of them."""
    of = KINDS[fault.kind]
    if (of.mounts and (why := no_disks())) or (of.alone and (why := no_llama())):
        return Ended(fault, "skipped", why=why)
    reference = references[fault.flavour]
    begin = time.monotonic()
    rate = RATE if fault.kind == "link slowed" else float("inf")
    with (
        soak_alone.AloneScene(fault.flavour, HARD_S)
        if of.alone
        else Scene(fault.flavour, HARD_S, rate)
    ) as scene:
        said: list[str] = []
        try:
            try:
                said = of.play(scene, fault, reference)
            except Nothing:
                of = replace(of, ends="any")
            scene.check(reference.told)
            _check_said(scene, said)
            recovery = scene.recovery_s() if scene.attempt else None
            if recovery is not None and recovery > RECOVERY_S:
                raise Wrong(
                    f"the first new step came {recovery:.1f} s after the restart, {RECOVERY_S:.0f}"
                    " are allowed"
                )
            how, why = of.ends if of.ends != "any" else "sentence" if said else "went on", ""
        except Hung as error:
            how, why, recovery = "hung", str(error), None
        except Wrong as error:
            how, why, recovery = (
                "failed",
                str(error),
                scene.recovery_s() if scene.attempt > 0 else None,
            )
        return Ended(
            fault, how, tuple(said), recovery, scene.lasted_s(), time.monotonic() - begin, why
        )


def _check_said(scene: Scene, said: Sequence[str]) -> None:
    for one in said:
        if isinstance(scene, soak_alone.AloneScene):
            if str(scene.home) not in one:
                raise Wrong(f"does not say which file or directory: {one}")
        elif not WHO.search(one) or not WHAT.search(one):
            raise Wrong(f"does not say who, in which step or what was expected: {one}")


def undisturbed(flavour: str) -> Reference:
    if flavour in (ALONE, TRAINER):
        return _undisturbed_alone(flavour)
    with Scene(flavour, HARD_S) as scene:
        scene.start()
        scene.finished()
        told = tuple(scene.told())
        if any(len(one.steps) != STEPS for one in told):
            raise Wrong(f"the undisturbed run did not train {STEPS} steps: {told}")
        return Reference(
            told, {link: dict(relay.nbytes) for link, relay in scene.links.items()}, {}
        )


def _undisturbed_alone(flavour: str) -> Reference:
    with soak_alone.AloneScene(flavour, HARD_S) as scene:
        scene.start()
        scene.finished()
        (told,) = scene.told()
        calls = re.search(
            r"^0 calls (\d+) (\d+) (\d+)$", text := scene.log(0).read_text(), re.MULTILINE
        )
        if len(told.steps) != STEPS or not told.end or calls is None:
            raise Wrong(f"the undisturbed trainer did not train {STEPS} steps: {text}")
        return Reference(
            (told,), {}, dict(zip(("sync", "write", "ledger"), map(int, calls.groups())))
        )


def no_llama() -> str:
    """Why nobody can train alone here; empty where somebody can."""
    return (
        ""
        if find_spec("transformers")
        else "transformers is not installed (pip install 'roadtrain[hf]')"
    )


def no_disks() -> str:
    """Why no small file system can be made here; empty where one can."""
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
    keep: Callable[[Ended], None] | None = None,
) -> list[Ended]:
    """`keep` is given each fault as it ends."""
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


def table(ends: Sequence[Ended]) -> list[str]:
    """A row per kind, and one of all."""
    columns = (
        "count",
        "went on",
        "sentence",
        "failed",
        "hung",
        "skipped",
        "worst recovery s",
        "worst end s",
    )
    lines = [f"{'kind':26}" + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in columns)]
    kinds = [name for name in KINDS if any(end.fault.kind == name for end in ends)]
    for name in [*kinds, "all"]:
        these = [end for end in ends if name in (end.fault.kind, "all")]
        cells = [str(len(these))] + [
            str(sum(e.how == how for e in these) or "") for how in columns[1:6]
        ]
        cells[4] = cells[4] or "0"
        for values in ([e.recovery_s for e in these], [e.lasted_s for e in these]):
            known = [value for value in values if value is not None]
            cells.append(f"{max(known):.1f}" if known else "")
        lines.append(
            f"{name:26}" + "".join(f"{c:>{max(9, len(n) + 2)}}" for c, n in zip(cells, columns))
        )
    return lines


def command(
    faults: int | None = None,
    seed: int = 0,
    only: str | None = None,
    json: str | None = None,
    sums: bool = False,
) -> int:
    """Run scripted faults (kills, power cuts, flipped bits, cut links, full disks, wrong workers)
    against a small job on this machine; exit code 1 if anything hangs or a loss differs.

    Also 1 where a sum differs, or an end had no sentence.

    Args:
        faults: how many (300)
        sums: instead: spare hosts of a summation (100)
        seed: which (0)
        only: this fault's number, or FIRST-LAST, alone
        json: also write every fault to this file; with --only, into what it holds
    """
    if faults is not None and faults < 1:
        raise ConfigError(f"--faults {faults}: nothing would be tried", hint="--faults 300")
    if sums:
        if only is not None:
            raise ConfigError(
                "--sums with --only",
                hint="its faults strike one after another; --faults says how many",
            )
        return soak_sums.command(faults or 100, seed, json)
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
    """`7` or `50-99`. Raises ConfigError."""
    first, _, last = text.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise ConfigError(f"--only {text!r}", hint="a fault's number, or FIRST-LAST")
    return list(range(int(first), int(last or first) + 1))


def keep_end(path: Path, end: Ended, seed: int) -> None:
    """Into what the file holds of this seed, so that a soak can be run in pieces."""
    rows: dict[int, Any] = {}
    if path.exists() and (held := loads(path.read_text()))["seed"] == seed:
        rows = {row["fault"]["number"]: row for row in held["faults"]}
    rows[end.fault.number] = asdict(end)
    ordered = [rows[number] for number in sorted(rows)]
    whole = [Ended(**row | {"fault": Fault(**row["fault"])}) for row in ordered]
    body = {
        "name": "soak",
        "machine": machine(),
        "date": date.today().isoformat(),
        "seed": seed,
        "table": table(whole),
        "faults": ordered,
    }
    path.write_text(dumps(body, indent=1) + "\n")
