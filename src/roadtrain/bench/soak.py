"""`roadtrain soak`: scripted faults against a small job of two servers and two workers: real processes, real sockets.

Each fault must end in one of two ways: the run goes on, with the losses of a run that nothing happened to, bit for bit,
no committed step repeated, within RECOVERY_S of the restart; or, where a person made a mistake, with a sentence that
says which, and the run goes on once that is mended. Whatever ends by itself says a sentence with role, host, and the
step or what was expected. Nothing hangs. Fault K of a seed is always the same fault, and can be run alone.

A new kind is a function of a Scene and a Fault under `@kind`, and a place in CYCLE. Does NOT emulate lost packets,
latency or power cuts: what the kernel holds survives a killed process.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from json import dumps, loads
from pathlib import Path
from typing import Any

import psutil

from roadtrain.bench import soak_sums
from roadtrain.bench.report import machine
from roadtrain.bench.soak_job import FLAVOURS
from roadtrain.bench.soak_scene import SERVERS, STEPS, WORKERS, Hung, Scene, Told, Wrong
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.lab.relay import Way

RECOVERY_S = 10.0  # from the restart to the first new step
HARD_S = 90.0  # a fault that is not over by then hangs
SHORT_S = 3.0  # the job's own deadline where passing it is the point
RATE = 20e6  # bytes a second, of a link that is slowed
LEFT = 64 << 10  # bytes that a full disk has
WHO = re.compile(r"(server|worker) \d \((127\.0\.0\.1:\d+|/)")  # role and host; a relay's socket
WHAT = re.compile(r"step \d|wait(ed|ing) (\d+ s )?for|refused|another model|asked for")  # the step, what was expected


@dataclass(frozen=True)
class Fault:
    """It strikes when `moment` (of all bytes that an undisturbed run sends there) went over the link of worker
    `link[0]` and server `link[1]` in direction `way`. `prompt`: what was killed is started again at once, not when all
    others have ended. `choice`: what the kind draws besides."""

    number: int
    kind: str
    victims: tuple[str, ...]
    flavour: str
    link: tuple[int, int]
    way: Way
    moment: float
    prompt: bool
    choice: int

    def __str__(self) -> str:
        return (f"{self.number}: {self.kind} ({', '.join(self.victims)}), {self.flavour}, at {self.moment:.3f} of "
                f"worker {self.link[0]}, server {self.link[1]}, {self.way}{', prompt' if self.prompt else ''}")


@dataclass(frozen=True)
class Ended:
    """`how`: went on, sentence, failed, hung, skipped. `sentences`: of processes that ended by themselves; `lasted_s`:
    from the fault to the end of the last of them."""

    fault: Fault
    how: str
    sentences: tuple[str, ...] = ()
    recovery_s: float | None = None
    lasted_s: float | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Reference:
    """The run that nothing happened to. `nbytes`: over each link and way."""

    told: tuple[Told, ...]
    nbytes: dict[tuple[int, int], dict[Way, int]]


Play = Callable[[Scene, Fault, Reference], list[str]]
KINDS: dict[str, tuple[Play, bool]] = {}  # name -> what happens, whether its end is a sentence


def kind(name: str, *, sentence: bool = False) -> Callable[[Play], Play]:
    """`sentence`: a mistake that the run cannot go on with; the function mends it. It returns what was said."""
    def known(play: Play) -> Play:
        KINDS[name] = play, sentence
        return play
    return known


CYCLE = (  # every kind is among any so many faults; a kind that has many moments comes more often
    "worker killed", "server killed", "link cut", "all killed", "server moved", "another model", "disk full",
    "killed twice", "link slowed", "wrong token", "worker killed", "server killed", "link cut", "process stopped",
    "disk full at the start", "another dtype", "link stalled", "state outgrows the disk", "server killed",
    "relay killed",
)


def drawn(seed: int, number: int) -> Fault:
    """Fault `number` of a seed."""
    name, rng = CYCLE[number % len(CYCLE)], random.Random(f"{seed}/{number}")
    link = rng.randrange(WORKERS), rng.randrange(SERVERS)
    workers, servers = ([f"{role} {i}" for i in range(n)] for role, n in (("worker", WORKERS), ("server", SERVERS)))
    if name == "all killed":
        victims = rng.choice([workers, servers, workers + servers, workers + servers])
    elif name in ("killed twice", "process stopped"):
        victims = rng.sample(workers + servers, 2 if name == "killed twice" else 1)
    elif name.startswith("server"):
        victims = [rng.choice(servers)]
    elif name.startswith("relay"):
        victims, link = ["relay of worker 0"], (0, link[1])
    elif name.startswith(("disk", "state")):
        victims = ["server 0" if name.startswith("state") else rng.choice(servers)]
    elif name.startswith("link"):
        victims = [f"worker {link[0]}", f"server {link[1]}"]
    else:
        victims = [rng.choice(workers)]
    way: Way = rng.choice(("there", "back"))
    return Fault(number, name, tuple(victims), rng.choice(list(FLAVOURS)), link, way, rng.uniform(0, 0.9),
                 rng.random() < 0.5, rng.randrange(1 << 16))


# the kinds


def _at(scene: Scene, fault: Fault, reference: Reference, do: Callable[[], None], first: float = 0.0) -> None:
    """`do`, in the relay's thread, at the fault's moment; not before `first` of all bytes."""
    def strike() -> None:
        do()
        scene.struck_at = time.monotonic()
        scene.struck.set()
    moment = first + fault.moment * (1 - first)
    scene.links[fault.link].at(int(moment * reference.nbytes[fault.link][fault.way]), fault.way, strike)


def _kill(scene: Scene, victims: Iterable[str]) -> None:
    for victim in victims:
        role, _, number = victim.partition(" ")
        (scene.workers if role == "worker" else scene.servers)[int(number)].kill()


@kind("worker killed")
@kind("server killed")
@kind("all killed")
def killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    scene.start()
    _at(scene, fault, reference, lambda: _kill(scene, fault.victims))
    return _supervised(scene, fault)


@kind("killed twice")
def killed_twice(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """And once more while it recovers, or soon after."""
    scene.start()
    _at(scene, fault, reference, lambda: _kill(scene, fault.victims[:1]))
    said = _supervised(scene, fault, last=False)
    scene.struck.clear()
    scene.start()
    link = scene.links[fault.link]
    link.at(link.nbytes[fault.way] + fault.choice % 40_000, fault.way, lambda: _kill(scene, fault.victims[1:]))
    said += scene.wait_workers()
    if not all(w.process.exitcode == 0 for w in scene.workers):
        scene.finish()
    return said


@kind("relay killed")
def relay_killed(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """The process that communicates for both workers. Its links carry less than half of what the workers' do."""
    def kill() -> None:
        for child in psutil.Process(scene.workers[0].process.pid).children():
            child.kill()
    scene.relay = True
    scene.start()
    _at(scene, replace(fault, moment=fault.moment / 3), reference, kill)
    return _supervised(scene, fault)


@kind("server moved")
def moved(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Killed, and started again on another address with the same store; the workers are given the new one."""
    scene.start()
    _at(scene, fault, reference, lambda: _kill(scene, fault.victims))
    scene.wait_struck()
    said = scene.wait_workers()
    before = time.monotonic()
    scene.serve(int(fault.victims[0][-1]), moved=True)
    scene.start()
    scene.restarted = before
    scene.finished()
    return said


def _supervised(scene: Scene, fault: Fault, *, last: bool = True) -> list[str]:
    """What torchrun does for workers, and whatever starts servers for these, after somebody was killed."""
    scene.wait_struck()
    if fault.prompt:
        for number, server in enumerate(scene.servers):
            if server.killed:
                server.process.join()
                scene.serve(number)
    said = scene.wait_workers()
    if last:
        scene.finish()
    return said


@kind("link cut")
def cut(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """After exactly so many bytes, most likely in the middle of a frame."""
    scene.start()
    link, moment = scene.links[fault.link], int(fault.moment * reference.nbytes[fault.link][fault.way])
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
    _at(scene, fault, reference, lambda: None)
    scene.wait_struck()
    scene.links[fault.link].set_rate(RATE / 10)
    scene.finished()
    return []


@kind("link stalled")
def stalled(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Nothing passes and nobody hangs up: the deadline is all there is."""
    scene.start(deadline_s=SHORT_S)
    _at(scene, fault, reference, lambda: None)
    scene.wait_struck()
    scene.links[fault.link].stall()
    said = scene.wait_workers()
    scene.links[fault.link].resume()
    scene.finish()
    return said


@kind("process stopped")
def stopped(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """SIGSTOP: it is there and does nothing. Afterwards it is killed, or goes on and finds the others gone."""
    (victim,) = fault.victims
    scene.start(deadline_s=SHORT_S)
    role, _, number = victim.partition(" ")
    node = (scene.workers if role == "worker" else scene.servers)[int(number)]
    _at(scene, fault, reference, lambda: os.kill(node.process.pid, signal.SIGSTOP))
    scene.wait_struck()
    others = [w for w in scene.workers if w is not node]
    for other in others:
        other.process.join(max(0.0, scene.until - time.monotonic()))
        if not other.ended:
            scene.hung("a worker to end whose peer was stopped")
    if role == "worker" or fault.choice % 2:
        node.kill()
    os.kill(node.process.pid, signal.SIGCONT)
    if node.killed:
        node.process.join()
    said = scene.wait_workers()
    scene.finish()
    return said


@kind("disk full")
def full(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """While it trains: all that a step needs was allocated when the store was made."""
    disk = scene.disk(int(fault.victims[0][-1]))
    scene.start()
    _at(scene, fault, reference, lambda: None, first=0.5)
    scene.wait_struck()
    _fill(disk)
    scene.finished()
    return []


@kind("disk full at the start", sentence=True)
def full_at_first(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    disk = scene.disk(int(fault.victims[0][-1]))
    ballast = _fill(disk)
    scene.start()
    said = _refused(scene, rf"{disk}.* are free")
    ballast.unlink()
    scene.finish()
    return said


@kind("state outgrows the disk", sentence=True)
def outgrown(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """What the job commits with a step no longer fits: the step before it stays."""
    disk, at = scene.disk(0), 1 + fault.choice % (STEPS - 2)
    scene.start(steps=at)
    scene.finished()
    ballast = _fill(disk)
    scene.start(wrong={rank: {"grows_at": at} for rank in range(WORKERS)})
    said = _refused(scene, rf"{disk}.*record of step \d+.* are free")
    ballast.unlink()
    scene.finish()
    return said


@kind("another model", sentence=True)
@kind("another dtype", sentence=True)
@kind("wrong token", sentence=True)
def foreign(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """One worker is not like the others, at the first start or, if `prompt`, at a later one."""
    change = fault.kind.rpartition(" ")[2]
    rank = int(fault.victims[0][-1])
    if fault.prompt or (rank == 0 and change != "token"):  # worker 0 alone says what a new store holds
        scene.start(steps=1 + fault.choice % (STEPS - 2))
        scene.finished()
    scene.start(deadline_s=SHORT_S, wrong={rank: {"change": change}})
    said = _refused(scene, "the token does not match" if change == "token" else "another model|dtype")
    scene.finish()
    return said


def _refused(scene: Scene, words: str) -> list[str]:
    """Nobody got far, and somebody said why."""
    said = scene.wait_workers()
    if len(said) != WORKERS or not any(re.search(words, sentence) for sentence in said):
        raise Wrong(f"nobody says {words!r}: {' | '.join(said)}")
    return said


def _fill(disk: Path) -> Path:
    free = os.statvfs(disk)
    with open(disk / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(0, free.f_bavail * free.f_frsize - LEFT))
    return disk / "ballast"


# the run


def play(fault: Fault, references: dict[str, Reference]) -> Ended:
    """One fault, from the start of its processes to the end of the last of them."""
    reference = references[fault.flavour]
    function, sentence = KINDS[fault.kind]
    if fault.kind.startswith(("disk", "state")) and (why := no_disks()):
        return Ended(fault, "skipped", why=why)
    begin = time.monotonic()
    with Scene(fault.flavour, HARD_S, RATE if fault.kind == "link slowed" else float("inf")) as scene:
        said: list[str] = []
        try:
            said = function(scene, fault, reference)
            scene.check(reference.told)
            for one in said:
                if not WHO.search(one) or not WHAT.search(one):
                    raise Wrong(f"does not say who, in which step or what was expected: {one}")
            recovery = scene.recovery_s() if scene.attempt else None
            if recovery is not None and recovery > RECOVERY_S:
                raise Wrong(f"the first new step came {recovery:.1f} s after the restart, {RECOVERY_S:.0f} are allowed")
            how, why = "sentence" if sentence else "went on", ""
        except Hung as error:
            how, why, recovery = "hung", str(error), None
        except Wrong as error:
            how, why, recovery = "failed", str(error), scene.recovery_s() if scene.attempt > 0 else None
        return Ended(fault, how, tuple(said), recovery, scene.lasted_s(), time.monotonic() - begin, why)


def undisturbed(flavour: str) -> Reference:
    with Scene(flavour, HARD_S) as scene:
        scene.start()
        scene.finished()
        told = tuple(scene.told())
        if any(len(one.steps) != STEPS for one in told):
            raise Wrong(f"the undisturbed run did not train {STEPS} steps: {told}")
        return Reference(told, {link: dict(relay.nbytes) for link, relay in scene.links.items()})


def no_disks() -> str:
    """Why no small file system can be made here; empty where one can."""
    try:
        with Scene("plain", HARD_S) as scene:
            scene.disk(0)
    except RoadtrainError as error:
        return str(error)
    return ""


def soak(
    numbers: Sequence[int], seed: int, say: Callable[[str], None] = print, keep: Callable[[Ended], None] | None = None
) -> list[Ended]:
    """`keep` is given each fault as it ends."""
    faults = [drawn(seed, number) for number in numbers]
    references = {flavour: undisturbed(flavour) for flavour in sorted({fault.flavour for fault in faults})}
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
    columns = ("count", "went on", "sentence", "failed", "hung", "skipped", "worst recovery s", "worst end s")
    lines = [f"{'kind':26}" + "".join(f"{name:>{max(9, len(name) + 2)}}" for name in columns)]
    kinds = [name for name in KINDS if any(end.fault.kind == name for end in ends)]
    for name in [*kinds, "all"]:
        these = [end for end in ends if name in (end.fault.kind, "all")]
        cells = [str(len(these))] + [str(sum(e.how == how for e in these) or "") for how in columns[1:6]]
        cells[4] = cells[4] or "0"
        for values in ([e.recovery_s for e in these], [e.lasted_s for e in these]):
            known = [value for value in values if value is not None]
            cells.append(f"{max(known):.1f}" if known else "")
        lines.append(f"{name:26}" + "".join(f"{c:>{max(9, len(n) + 2)}}" for c, n in zip(cells, columns)))
    return lines


def command(
    faults: int | None = None, seed: int = 0, only: str | None = None, json: str | None = None, sums: bool = False
) -> int:
    """`roadtrain soak`. 1 where anything hung, a loss or a sum differs, or an end had no sentence."""
    if sums:
        if only is not None:
            raise ConfigError("--sums with --only", hint="its faults strike one after another; --faults says how many")
        return soak_sums.command(faults or 100, seed, json)
    faults = faults or 200
    numbers = list(range(faults)) if only is None else _numbers(only)
    print(f"soak: {len(numbers)} faults of seed {seed}; {machine()}")
    path = Path(json) if json is not None else None
    if path is not None and only is None:
        path.unlink(missing_ok=True)
    ends = soak(numbers, seed, keep=None if path is None else lambda end: _keep(path, end, seed))
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


def _keep(path: Path, end: Ended, seed: int) -> None:
    """Into what the file holds of this seed, so that a soak can be run in pieces."""
    rows: dict[int, Any] = {}
    if path.exists() and (held := loads(path.read_text()))["seed"] == seed:
        rows = {row["fault"]["number"]: row for row in held["faults"]}
    rows[end.fault.number] = asdict(end)
    ordered = [rows[number] for number in sorted(rows)]
    whole = [Ended(**row | {"fault": Fault(**row["fault"])}) for row in ordered]
    body = {"name": "soak", "machine": machine(), "date": date.today().isoformat(), "seed": seed,
            "table": table(whole), "faults": ordered}
    path.write_text(dumps(body, indent=1) + "\n")
