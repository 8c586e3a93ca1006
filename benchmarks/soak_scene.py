"""The stage of `roadtrain soak`: the processes, links and files of one fault, and what they wrote
down.

Each worker reaches each server through a relay of its own, so a moment is a number of bytes that
went over one of these links, and a link can be cut after exactly so many. A scene has one deadline
for everything; who is not done by then hangs, and says where it stands.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.soak_job import REFUSED, Errand, serve, work
from benchmarks.soak_power import Strike
from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.lab.bad_link import Relay, Way

SERVERS, WORKERS, STEPS = 2, 2, 6
PATIENCE_S = 10.0  # the job's own deadline
TOKEN = b"the secret of a soaked job"
DISK = "16m"
NOTHING: Mapping[int, Mapping[str, Any]] = {}
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["benchmarks.soak_warm"])


class Hung(DeadlineError):
    """With the stacks of all that still ran."""


class Wrong(RoadtrainError):
    """A loss that differs, a lost step, an end without a sentence."""


class Counted(Relay):
    """A relay that calls `do`, from its own thread, in the moment before byte `nbytes` of a way is
    passed on.
    `cut_at`: when it was cut."""

    def __init__(self, target: tuple[str, int], bytes_per_s: float = float("inf")) -> None:
        super().__init__(target, bytes_per_s)
        self.nbytes, self.cut_at = _Count(self.nbytes), 0.0

    def at(self, nbytes: int, way: Way, do: Callable[[], None]) -> None:
        count = self.nbytes
        assert isinstance(count, _Count)
        count.armed = (nbytes, way, do)

    def _cut(self, way: Way) -> None:
        self.cut_at = time.monotonic()
        super()._cut(way)


class _Count(dict[Way, int]):
    armed: tuple[int, Way, Callable[[], None]] | None = None

    def __setitem__(self, way: Way, nbytes: int) -> None:
        super().__setitem__(way, nbytes)
        if self.armed and self.armed[1] == way and nbytes >= self.armed[0]:
            (_, _, do), self.armed = self.armed, None
            do()


@dataclass
class Node:
    """A process of the scene. `killed`: by us, so that nothing is asked of how it ended."""

    process: Any
    log: Path
    where: str = ""
    killed: bool = False

    def kill(self) -> None:
        self.killed = True
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """A signal, which one that has ended does not get."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def gone(self) -> bool:
        """Whether it has ended; waits for the end of what was killed."""
        if self.killed:
            self.process.join()
        return self.ended

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None


@dataclass
class Told:
    """What a worker wrote down. `steps`: (attempt, step) -> (loss and norm, committed step it
    knew of, seconds)."""

    steps: dict[tuple[int, int], tuple[str, int, float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # attempt -> sentence
    end: str = ""

    @staticmethod
    def read(log: Path) -> Told:
        told = Told()
        for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
            first, _, rest = line.partition(" ")
            what, _, more = rest.partition(" ")
            if not first.isdigit() or (not what.isdigit() and what not in ("error", "end")):
                continue
            if what == "error":
                told.errors[int(first)] = more
            elif what == "end":
                told.end = more
            elif len(words := more.split()) == 4:  # a killed process may leave half a line
                told.steps[int(first), int(what)] = (
                    " ".join(words[:2]),
                    int(words[2]),
                    float(words[3]),
                )
        return told


class Scene:
    """Inside its context. `began`: when the last start of workers began; `struck`: set when the
    fault has happened."""

    def __init__(self, flavour: str, hard_s: float, rate: float = float("inf")) -> None:
        self.flavour, self.rate = flavour, rate
        self.relay = False  # workers start with one, over worker 0's links
        self.replicas = 1
        self.run: Path | None = None  # worker 0's run directory, where it has one
        # server -> what is durable of its directory, where that is watched
        self.shadows: dict[int, Path] = {}
        self.strikes: dict[int, list[Strike]] = {}  # server -> what its next start is told
        self.until = time.monotonic() + hard_s
        self.servers: list[Node] = []
        self.workers: list[Node] = []
        self.links: dict[tuple[int, int], Counted] = {}  # (worker, server)
        self.attempt = -1
        self.restarted = 0.0
        self.struck, self.struck_at = threading.Event(), 0.0
        self._last = 0.0  # when the last worker of a start that was struck ended
        self._all: list[Node] = []
        self._undo = ExitStack()

    def __enter__(self) -> Scene:
        self.home = Path(
            self._undo.enter_context(tempfile.TemporaryDirectory(prefix="roadtrain-soak-"))
        )
        self.stores = [self.home / f"server{s}" for s in range(SERVERS)]
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._all:
            if not node.ended:
                node.kill()
            node.process.join()
        for link in self.links.values():
            link.__exit__()
        self._undo.close()

    # what happens

    def start(
        self,
        *,
        steps: int = STEPS,
        deadline_s: float = PATIENCE_S,
        wrong: Mapping[int, Mapping[str, Any]] = NOTHING,
        without: int = -1,
    ) -> None:
        """Starts what does not run, as supervisors do, but for server `without`. `wrong`: rank
        -> what else its Errand says."""
        self.restarted = time.monotonic()
        for number in range(SERVERS):
            if number != without and (len(self.servers) <= number or self.servers[number].gone()):
                self.serve(number)
        self.attempt += 1
        self.workers = []
        for rank in range(WORKERS):
            by = 0 if self.relay else rank
            where = tuple("{}:{}".format(*self.links[by, s].address) for s in range(SERVERS))
            log = self.log(rank)
            run = "" if rank or self.run is None else str(self.run)
            errand = Errand(
                self.flavour,
                where,
                rank,
                WORKERS,
                self.attempt,
                steps,
                str(log),
                deadline_s,
                self.relay,
                replicas=self.replicas,
                run=run,
                **wrong.get(rank, {}),
            )
            self.workers.append(self._started(work, (errand, TOKEN), log))

    def serve(self, number: int, *, moved: bool = False) -> None:
        """Server `number`, with its directory: where it was, or `moved` to another address that
        workers are given."""
        old = self.servers[number] if len(self.servers) > number else None
        port = int(old.where.rpartition(":")[2]) if old is not None and not moved else 0
        here, there = FORK.Pipe()
        log = self.home / f"server{number}.log"
        shadow = str(self.shadows.get(number, ""))
        words = (
            str(self.stores[number]),
            port,
            TOKEN,
            str(log),
            there,
            shadow,
            self.strikes.pop(number, []),
        )
        node = self._started(serve, words, log)
        there.close()
        if not here.poll(max(0.0, self.until - time.monotonic())):
            self.hung(f"server {number} to listen")
        try:
            node.where = here.recv()
        except EOFError:
            raise Wrong(f"server {number} did not start: {log.read_text()[-2000:]}") from None
        finally:
            here.close()
        self.servers[number : number + 1] = [node]
        if old is None or moved:
            host, _, port_text = node.where.rpartition(":")
            for rank in range(WORKERS):
                if (rank, number) in self.links:
                    self.links[rank, number].__exit__()
                self.links[rank, number] = Counted((host, int(port_text)), self.rate).__enter__()  # type: ignore[assignment]

    def wait_struck(self) -> None:
        """Until the fault has happened. Wrong where the run ended before."""
        while not self.struck.wait(0.02):
            if all(w.ended for w in self.workers) and not self.struck.is_set():
                raise Wrong(
                    f"the run ended before the fault: {[w.process.exitcode for w in self.workers]},"
                    f" {[told.errors for told in self.told()]}"
                )
            if time.monotonic() > self.until:
                self.hung("the moment of the fault")

    def wait_workers(self) -> list[str]:
        """Until all workers have ended; the sentences of those that ended by themselves before
        they were done."""
        for rank, worker in enumerate(self.workers):
            worker.process.join(max(0.0, self.until - time.monotonic()))
            if not worker.ended:
                self.hung(f"worker {rank} to end")
        self._last = self._last or time.monotonic()
        sentences = []
        for rank, (worker, told) in enumerate(zip(self.workers, self.told())):
            code = worker.process.exitcode
            if worker.killed or code == 0:
                continue
            if code != REFUSED or self.attempt not in told.errors:
                raise Wrong(
                    f"worker {rank} ended with {code} and no sentence:"
                    f" {worker.log.read_text()[-2000:]}"
                )
            sentences.append(told.errors[self.attempt])
        return sentences

    def ended_workers(self) -> list[str]:
        """As wait_workers, where a server may have struck itself dead: it counts as killed."""
        said = self.wait_workers()
        for server in self.servers:
            if said and not server.killed:
                server.process.join(1.0)
            server.killed |= server.process.exitcode == -signal.SIGKILL
        return said

    def finish(self) -> None:
        """Starts what does not run, and the run is to end well."""
        self.start()
        self.finished()

    def finished(self) -> None:
        if sentences := self.wait_workers():
            raise Wrong(f"does not go on: {' | '.join(sentences)}")

    # what is known

    def log(self, rank: int) -> Path:
        return self.home / f"worker{rank}.log"

    def told(self) -> list[Told]:
        return [Told.read(self.log(rank)) for rank in range(WORKERS)]

    def recovery_s(self) -> float | None:
        """From the last start to its first step on the last of the workers. None where no step
        was left to do."""
        firsts = [
            [at for (attempt, _), (_, _, at) in told.steps.items() if attempt == self.attempt]
            for told in self.told()
        ]
        return max(min(f) for f in firsts) - self.restarted if all(firsts) else None

    def lasted_s(self) -> float | None:
        """From the fault to the end of all workers of that start; None where that end was not
        the fault's."""
        return self._last - self.struck_at if self.struck_at and self.attempt else None

    def check(self, reference: Sequence[Told]) -> None:
        """Every loss that any start saw is that of the undisturbed run; no step is missing, none
        known as committed was repeated; the parameters and the optimizer's state are the same at
        the end."""
        for rank, (told, whole) in enumerate(zip(self.told(), reference)):
            expected = {step: line for (_, step), (line, _, _) in whole.steps.items()}
            for (attempt, step), (line, _, _) in told.steps.items():
                if expected.get(step) != line:
                    raise Wrong(
                        f"worker {rank}, start {attempt}, step {step}: loss and norm {line}, "
                        f"undisturbed {expected.get(step)}"
                    )
            if missing := set(expected) - {step for _, step in told.steps}:
                raise Wrong(f"worker {rank}: step(s) {sorted(missing)} are missing")
            if told.end != whole.end:
                raise Wrong(
                    f"worker {rank}: the state at the end is {told.end}, undisturbed {whole.end}"
                )
        known = -1
        for attempt in range(self.attempt + 1):
            of = [
                (step, committed)
                for told in self.told()
                for (a, step), (_, committed, _) in told.steps.items()
                if a == attempt
            ]
            if of and min(step for step, _ in of) <= known:
                raise Wrong(
                    f"start {attempt} repeats step {min(of)[0]}, step {known} was committed"
                )
            known = max([known, *(committed for _, committed in of)])
        for number, server in enumerate(self.servers):
            if server.ended and not server.killed:
                raise Wrong(f"server {number} ended with {server.process.exitcode}")
        for log in self.home.glob("*.log"):
            if "Traceback" in (text := log.read_text(errors="replace")):
                raise Wrong(f"a traceback in {log.name}: {text[text.index('Traceback') :][:3000]}")

    def note(self, text: str) -> None:
        """For people, into worker 0's log."""
        with open(self.log(0), "a") as file:
            file.write(f"{text}\n")

    def pipe(self) -> tuple[Connection, Connection]:
        """Its two ends."""
        return FORK.Pipe()

    def hung(self, what: str) -> None:
        """Raises Hung with the stacks of all processes."""
        living = [node for node in self._all if not node.ended]
        for node in living:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(node.process.pid, signal.SIGCONT)
                os.kill(node.process.pid, signal.SIGUSR1)
        with open(self.home / "soak.log", "w") as file:
            faulthandler.dump_traceback(file)
        time.sleep(1.0)
        said = [
            f"--- {log.name}\n{log.read_text(errors='replace')}"
            for log in sorted(self.home.glob("*.log"))
        ]
        raise Hung(f"waited in vain for {what}\n" + "\n".join(said))

    def disk(self, number: int) -> Path:
        """Gives server `number` a small file system of its own. RoadtrainError where that is
        not allowed."""
        where = self.home / f"disk{number}"
        where.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(where)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RoadtrainError(f"no file system can be mounted: {done.stderr.strip()}")
        self._undo.callback(subprocess.run, ["umount", "-l", str(where)], check=False)
        self.stores[number] = where / "store"
        return where

    def _started(self, target: Callable[..., None], words: tuple[Any, ...], log: Path) -> Node:
        process = FORK.Process(target=target, args=words, daemon=True)
        process.start()
        self._all.append(Node(process, log))
        return self._all[-1]
