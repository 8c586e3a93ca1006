"""The scene of a fault of `roadtrain soak`: the processes, links and files of the job, and the logs
of the workers.

Each worker reaches each server through a relay of its own, which can cut the link after an exact
number of bytes. A scene has one deadline for all waiting. Processes that have not ended by then
count as hung, and dump their stacks.
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
from pathlib import Path
from typing import Any

from benchmarks.soak.job import REFUSED, WorkerArgs, serve, work
from benchmarks.soak.power import Strike
from roadtrain.errors import DeadlineError, RoadtrainError
from roadtrain.lab.bad_link import Relay, Way

SERVERS, WORKERS, STEPS = 2, 2, 6
PATIENCE_S = 10.0  # the job's own deadline
TOKEN = b"the secret of a soaked job"
DISK = "16m"
NOTHING: Mapping[int, Mapping[str, Any]] = {}
FORK = multiprocessing.get_context("forkserver")


class Hung(DeadlineError):
    """Raised when the deadline of a scene has passed. The message has the logs of all
    processes.
    """


class Wrong(RoadtrainError):
    """Raised if a run under test behaves wrongly, for example loses a step or ends without an error
    message.
    """


class CountedRelay(Relay):
    """A relay that counts bytes. After `at(nbytes, way, do)`, its thread calls `do` right before it
    passes on byte `nbytes` of direction `way`. `cut_at`: monotonic time at which the link was cut.
    """

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
    """A process of the scene. `killed`: True if the scene has killed the process."""

    process: Any
    log: Path
    where: str = ""
    killed: bool = False

    def kill(self) -> None:
        self.killed = True
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def reaped(self) -> bool:
        """Check whether the process has ended. If the scene killed the process, first wait for its
        end.
        """
        if self.killed:
            self.process.join()
        return self.ended

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None


@dataclass
class WorkerLog:
    """Parsed log of a worker. `steps`: maps (attempt, step) to (loss and norm, committed step,
    seconds).
    """

    steps: dict[tuple[int, int], tuple[str, int, float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # attempt -> error message
    end: str = ""

    @staticmethod
    def read(path: Path) -> WorkerLog:
        log = WorkerLog()
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            first, _, rest = line.partition(" ")
            what, _, more = rest.partition(" ")
            if not first.isdigit() or (not what.isdigit() and what not in ("error", "end")):
                continue
            if what == "error":
                log.errors[int(first)] = more
            elif what == "end":
                log.end = more
            elif len(words := more.split()) == 4:  # a killed process may leave an incomplete line
                log.steps[int(first), int(what)] = (
                    " ".join(words[:2]),
                    int(words[2]),
                    float(words[3]),
                )
        return log


class Scene:
    """Processes, links and files for one fault, used as a context manager. `restarted`: time at
    which the last start began. `struck`: event that is set when the fault has happened.
    """

    def __init__(self, flavour: str, hard_s: float, rate: float = float("inf")) -> None:
        self.flavour, self.rate = flavour, rate
        self.relay = False  # workers start with a relay, over worker 0's links
        self.replicas = 1
        self.run: Path | None = None  # worker 0's run directory, if it has one
        # server -> shadow of its directory's durable content, if it is tracked
        self.shadows: dict[int, Path] = {}
        self.strikes: dict[int, list[Strike]] = {}  # server -> strikes of its next start
        self.until = time.monotonic() + hard_s
        self.servers: list[Node] = []
        self.workers: list[Node] = []
        self.links: dict[tuple[int, int], CountedRelay] = {}  # (worker, server)
        self.attempt = -1
        self.restarted = 0.0
        self.struck, self.struck_at = threading.Event(), 0.0
        self._last = 0.0  # when the last worker of a struck start ended
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

    # processes and waiting

    def start(
        self,
        *,
        steps: int = STEPS,
        deadline_s: float = PATIENCE_S,
        wrong: Mapping[int, Mapping[str, Any]] = NOTHING,
        without: int = -1,
    ) -> None:
        """Start all processes that do not run, except server `without`.

        Args:
            wrong: maps the rank of a worker to the fields of its WorkerArgs that differ from the
                usual ones
        """
        self.restarted = time.monotonic()
        for number in range(SERVERS):
            if number != without and (len(self.servers) <= number or self.servers[number].reaped()):
                self.serve(number)
        self.attempt += 1
        self.workers = []
        for rank in range(WORKERS):
            by = 0 if self.relay else rank
            where = tuple("{}:{}".format(*self.links[by, s].address) for s in range(SERVERS))
            log = self.log(rank)
            run = "" if rank or self.run is None else str(self.run)
            args = WorkerArgs(
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
            self.workers.append(self.started(work, (args, TOKEN), log))

    def serve(self, number: int, *, moved: bool = False) -> None:
        """Start server `number` on its directory, and give the workers its new address if `moved`.
        Otherwise the server keeps its address.
        """
        old = self.servers[number] if len(self.servers) > number else None
        port = int(old.where.rpartition(":")[2]) if old is not None and not moved else 0
        log, shadow = self.home / f"server{number}.log", str(self.shadows.get(number, ""))
        node = self.listening(number, port, log, shadow, self.strikes.pop(number, []))
        self.servers[number : number + 1] = [node]
        if old is None or moved:
            host, _, port_text = node.where.rpartition(":")
            for rank in range(WORKERS):
                if (rank, number) in self.links:
                    self.links[rank, number].__exit__()
                self.links[rank, number] = CountedRelay(
                    (host, int(port_text)), self.rate
                ).__enter__()  # type: ignore[assignment]

    def listening(
        self, number: int, port: int, log: Path, shadow: str = "", strikes: Sequence[Strike] = ()
    ) -> Node:
        """Start a server on the directory of server `number`, and wait until it listens."""
        here, there = FORK.Pipe()
        words = (str(self.stores[number]), port, TOKEN, str(log), there, shadow, strikes)
        node = self.started(serve, words, log)
        there.close()
        if not here.poll(max(0.0, self.until - time.monotonic())):
            self.hung(f"server {number} to listen")
        try:
            node.where = here.recv()
        except EOFError:
            raise Wrong(f"server {number} did not start: {log.read_text()[-2000:]}") from None
        finally:
            here.close()
        return node

    def join(self, node: Node, what: str) -> None:
        """Wait until a process has ended. `what`: the event, for the message if it hangs."""
        node.process.join(max(0.0, self.until - time.monotonic()))
        if not node.ended:
            self.hung(what)

    def wait_struck(self) -> None:
        """Wait until the fault has happened. Raises Wrong if the run ends before the fault."""
        while not self.struck.wait(0.02):
            if all(w.ended for w in self.workers) and not self.struck.is_set():
                raise Wrong(
                    f"the run ended before the fault: {[w.process.exitcode for w in self.workers]},"
                    f" {[log.errors for log in self.logs()]}"
                )
            if time.monotonic() > self.until:
                self.hung("the moment of the fault")

    def wait_workers(self) -> list[str]:
        """Wait until all workers have ended, and return the error messages of workers that
        failed.
        """
        for rank, worker in enumerate(self.workers):
            self.join(worker, f"worker {rank} to end")
        self._last = self._last or time.monotonic()
        sentences = []
        for rank, (worker, log) in enumerate(zip(self.workers, self.logs())):
            code = worker.process.exitcode
            if worker.killed or code == 0:
                continue
            if code != REFUSED or self.attempt not in log.errors:
                raise Wrong(
                    f"worker {rank} ended with exit code {code} and without an error message:"
                    f" {worker.log.read_text()[-2000:]}"
                )
            sentences.append(log.errors[self.attempt])
        return sentences

    def ended_workers(self) -> list[str]:
        """Wait like `wait_workers`, and mark a server that a Strike has killed as killed."""
        sentences = self.wait_workers()
        for server in self.servers:
            if sentences and not server.killed:
                server.process.join(1.0)
            server.killed |= server.process.exitcode == -signal.SIGKILL
        return sentences

    def finish(self, **options: Any) -> None:
        """Start all processes that do not run, and check that training goes on to its end.
        `options`: of `start`.
        """
        self.start(**options)
        self.finished()

    def finished(self) -> None:
        if sentences := self.wait_workers():
            raise Wrong(f"the run does not go on: {' | '.join(sentences)}")

    # results

    def log(self, rank: int) -> Path:
        return self.home / f"worker{rank}.log"

    def logs(self) -> list[WorkerLog]:
        return [WorkerLog.read(self.log(rank)) for rank in range(WORKERS)]

    def recovery_s(self) -> float | None:
        """Compute the seconds from the last start until the slowest worker has done a step, or None
        if no step was left.
        """
        firsts = [
            [at for (attempt, _), (_, _, at) in log.steps.items() if attempt == self.attempt]
            for log in self.logs()
        ]
        return max(min(f) for f in firsts) - self.restarted if all(firsts) else None

    def lasted_s(self) -> float | None:
        """Compute the seconds from the fault until all running workers have ended. Returns None
        without a fault or a restart.
        """
        return self._last - self.struck_at if self.struck_at and self.attempt else None

    def check(self, reference: Sequence[WorkerLog]) -> None:
        """Compare the logs of all workers with those of a run without faults.

        Every loss must equal the loss of the same step without faults. No step may be missing. A
        step that a worker knew to be committed may not be repeated. At the end, parameters and
        optimizer state must be equal.
        """
        for rank, (log, whole) in enumerate(zip(self.logs(), reference)):
            expected = {step: line for (_, step), (line, _, _) in whole.steps.items()}
            for (attempt, step), (line, _, _) in log.steps.items():
                if expected.get(step) != line:
                    raise Wrong(
                        f"worker {rank}, attempt {attempt}, step {step}: loss and norm are {line},"
                        f" but {expected.get(step)} in the run without faults"
                    )
            if missing := set(expected) - {step for _, step in log.steps}:
                raise Wrong(f"worker {rank} has not trained steps {sorted(missing)}")
            if log.end != whole.end:
                raise Wrong(
                    f"worker {rank}: the digest of the state at the end is {log.end}, but"
                    f" {whole.end} in the run without faults"
                )
        committed_before = -1
        for attempt in range(self.attempt + 1):
            of = [
                (step, committed)
                for log in self.logs()
                for (a, step), (_, committed, _) in log.steps.items()
                if a == attempt
            ]
            if of and min(step for step, _ in of) <= committed_before:
                raise Wrong(
                    f"attempt {attempt} trained step {min(of)[0]} again, although step"
                    f" {committed_before} was committed before"
                )
            committed_before = max([committed_before, *(committed for _, committed in of)])
        for number, server in enumerate(self.servers):
            if server.ended and not server.killed:
                raise Wrong(
                    f"server {number} ended by itself with exit code {server.process.exitcode}"
                )
        for path in self.home.glob("*.log"):
            if "Traceback" in (text := path.read_text(errors="replace")):
                raise Wrong(
                    f"{path.name} has a traceback: {text[text.index('Traceback') :][:3000]}"
                )

    def note(self, text: str) -> None:
        """Add a note to the log of worker 0."""
        with open(self.log(0), "a") as file:
            file.write(f"{text}\n")

    def hung(self, what: str) -> None:
        """Raise Hung with the logs of all processes. `what`: the event that did not happen
        in time.
        """
        living = [node for node in self._all if not node.ended]
        for node in living:
            with suppress(ProcessLookupError):  # if it has ended since
                os.kill(node.process.pid, signal.SIGCONT)
                os.kill(node.process.pid, signal.SIGUSR1)
        with open(self.home / "soak.log", "w") as file:
            faulthandler.dump_traceback(file)
        time.sleep(1.0)
        logs = [
            f"--- {log.name}\n{log.read_text(errors='replace')}"
            for log in sorted(self.home.glob("*.log"))
        ]
        raise Hung(f"deadline passed while waiting for {what}\n" + "\n".join(logs))

    def disk(self, number: int) -> Path:
        """Mount a small file system for server `number`, and return its path. Raises RoadtrainError
        if mounting is not allowed.
        """
        where = self.home / f"disk{number}"
        where.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(where)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RoadtrainError(f"cannot mount a small file system: {done.stderr.strip()}")
        self._undo.callback(subprocess.run, ["umount", "-l", str(where)], check=False)
        self.stores[number] = where / "store"
        return where

    def started(self, target: Callable[..., None], words: tuple[Any, ...], log: Path) -> Node:
        process = FORK.Process(target=target, args=words, daemon=True)
        process.start()
        self._all.append(Node(process, log))
        return self._all[-1]


def fill(disk: Path, left: int = 0) -> Path:
    """Fill a disk except `left` bytes. Returns the file that fills it."""
    free = os.statvfs(disk)
    with open(disk / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(0, free.f_bavail * free.f_frsize - left))
    return disk / "ballast"
