"""RunWatch follows one run: the metrics and timelines of all its processes, its servers, and for a
launched run its supervisor. Nothing is written. Does not import torch or Bokeh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from roadtrain.config.job import Job, job_of_run, load_job
from roadtrain.errors import ConfigError, LaunchError, PeerError, RoadtrainError
from roadtrain.launch.control_socket import ask_supervisor
from roadtrain.launch.home import ProcessRow, RunHome
from roadtrain.launch.host_report import mark_record
from roadtrain.launch.status_command import launched
from roadtrain.servers import health
from roadtrain.servers.trace import Interval
from roadtrain.storage.lock import holder_of, is_locked
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.training.metrics import metrics_files
from roadtrain.training.run_lines import LineTail, RunLines
from roadtrain.training.status import names_servers
from roadtrain.training.timeline import before_of, timeline_of
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.tcp import TcpOptions

ASK_EVERY_S, ANSWER_S = 0.3, 1.0  # pause between two queries of a server, and its time to answer
ASK_HOSTS_EVERY_S = 5.0  # a supervisor asks the hosts of its run
SILENT_S = 1.5  # a server that has not answered for so long is reported
INTERVALS_EVERY_S = 2.0
STEPS = 8  # the timeline shows so many steps
SLOW = 10.0  # a run is stalled if a step takes so many times the median
LEAST_S, FIRST_S = 10.0, 120.0  # but not before, nor before the first step of a session
TAIL_BYTES = 2**18  # of the files of which only the last lines are shown
IDLE = "no session"  # in the status of a server without workers
Ask = Callable[[], Any]  # returns a health.Status or an error


@dataclass
class NodeWatch:
    """A server, spare host or supervisor, and its last answer, which a thread updates."""

    role: str
    address: str
    every_s: float = ASK_EVERY_S
    text: str = ""
    error: str = ""  # of the last query; "" if it was answered
    waits: dict[str, tuple[float, str]] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    answered: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def silence(self) -> str:
        """A message if the node does not answer, else ""."""
        silent_s = time.monotonic() - self.answered
        if silent_s < max(SILENT_S, 2 * self.every_s):
            return ""
        return f"has not answered for {silent_s:.1f} s ({self.error or 'it is still asked'})"

    def follow(self, ask: Ask, ask_intervals: Ask | None = None) -> None:
        """Start to query the node in a thread of its own, until `over` is set."""
        name = f"asks {self.address}"
        threading.Thread(
            target=self._ask, args=(ask, ask_intervals), name=name, daemon=True
        ).start()

    def _ask(self, ask: Ask, ask_intervals: Ask | None) -> None:
        intervals_at = 0.0
        while not self.over.wait(self.every_s):
            status = ask()
            if isinstance(status, RoadtrainError):
                self.error = str(status).partition("\n")[0]
                continue
            self.text, self.waits, self.error = status[0], dict(status[1]), ""
            self.answered = time.monotonic()
            if ask_intervals and time.monotonic() - intervals_at > INTERVALS_EVERY_S:
                intervals_at, found = time.monotonic(), ask_intervals()
                self.intervals = self.intervals if isinstance(found, PeerError) else found


def ask_home(home: RunHome) -> tuple[str, dict[str, Any]] | LaunchError:
    """Return the lines that `roadtrain status` prints about the steps of a launched run."""
    try:
        return "; ".join(ask_supervisor(home, "status")["run"]["lines"]), {}
    except LaunchError as error:
        return error


class RankWatch:
    """The metrics and the timeline of one process."""

    def __init__(self, path: Path, whole: bool) -> None:
        tail = 0 if whole else TAIL_BYTES
        self.lines, self._metrics = RunLines(), LineTail(path, tail)
        timeline = timeline_of(path)
        self._timelines = [LineTail(file, TAIL_BYTES) for file in (before_of(timeline), timeline)]
        self.steps: dict[int, list[Interval]] = {}  # the intervals of the last steps

    def refresh(self) -> bool:
        """Read new lines. Returns whether there are any."""
        anew, lines = self._metrics.read()
        if not anew and lines and self.lines.step and lines[0]["step"] != self.lines.step + 1:
            self._metrics.rewind()  # uncommitted lines were removed
            anew, lines = self._metrics.read()
        if anew:
            self.lines = RunLines()
        for line in lines:
            self.lines.add(line)
        drawn = [line for timeline in self._timelines for line in timeline.read()[1]]
        for line in drawn:
            with suppress(msgspec.ValidationError, KeyError):
                step, own = line["step"], msgspec.convert(line["intervals"], list[Interval])
                earlier = sorted(item for item in self.steps.items() if item[0] < step)
                self.steps = dict([*earlier[1 - STEPS :], (step, own)])  # a restart repeats steps
        return anew or bool(lines or drawn)

    @property
    def intervals(self) -> list[Interval]:
        return [interval for intervals in self.steps.values() for interval in intervals]


class RunWatch:
    """A run that is followed. `refresh` reads what is new.

    Attributes:
        lines: The lines of rank 0.
        ranks: The files of each process, by rank.
        changed: When the last line was written, in seconds since 1970.
        processes: The processes of a launched run.
        version: Grows when there is more to draw.
    """

    def __init__(self, run: str) -> None:
        self.name, self.home = run, None
        self.nodes: list[NodeWatch] = []
        if names_servers(run):
            raise ConfigError(
                f"{run} names servers, which know no losses and no steps of workers",
                hint="name the run directory; `roadtrain status HOST:PORT` shows servers",
            )
        if not Path(run).is_dir() and (home := launched(run)) is not None:
            self.home, record = home, home.record()
            self.directory = Path(record.directory, load_job(home.job_path).run.dir)
            if record.engine != "here":
                node = NodeWatch("supervisor", run, ASK_HOSTS_EVERY_S)
                self._follow(node, partial(ask_home, home))
        else:
            self.directory = Path(run)
            job_of_run(run)  # raises ConfigError
        self.ranks: dict[int, RankWatch] = {}
        self.processes: Sequence[ProcessRow] = ()
        self.phase, self.changed, self.version, self.unasked, self.committed = "", 0.0, 0, "", -1
        self.job = self._job()
        if self.home is None:
            self._follow_nodes()
        self.refresh()

    def _job(self) -> Job:
        if (self.directory / "job.toml").is_file() or self.home is None:
            return job_of_run(str(self.directory))
        return load_job(self.home.job_path)

    def _follow_nodes(self) -> None:
        """Query the servers and spare hosts of the job, once they are known."""
        own, section = self.job.servers, self.job.parallelism
        nodes = [("server", address) for address in own.addresses]
        nodes += [("switch", switch.address) for switch in own.switches]
        try:
            options = TcpOptions(
                token=token_of(own.token_file), tls=tls_of(own.cert, own.key, own.ca)
            )
            spares = TcpOptions(token=token_of(section.reducers_token_file))
        except ConfigError as error:  # the run's files may be on another host
            self.unasked = f"servers are not asked: {error}".partition("\nhint: ")[0]
            return
        for role, address in nodes:
            ask = partial(health.ask, address_of(address), options, answer_s=ANSWER_S)
            intervals = partial(ask, hello=health.ASK_INTERVALS, kind=list[Interval])
            self._follow(NodeWatch(role, address), ask, intervals if role == "server" else None)
        if section.reducers:
            for address in SpareHosts(section.reducers, None, None).now():
                ask = partial(health.ask, address_of(address), spares, answer_s=ANSWER_S)
                self._follow(NodeWatch("spare host", address), ask)

    def _follow(self, node: NodeWatch, ask: Ask, ask_intervals: Ask | None = None) -> None:
        node.follow(ask, ask_intervals)
        self.nodes.append(node)

    @property
    def lines(self) -> RunLines:
        return self.ranks[0].lines if 0 in self.ranks else RunLines()

    def refresh(self) -> None:
        """Read what is new since the last call."""
        for rank, path in metrics_files(self.directory).items():
            watch = self.ranks.setdefault(rank, RankWatch(path, whole=rank == 0))
            if watch.refresh():
                self.version += 1
                with suppress(OSError):
                    self.changed = max(self.changed, path.stat().st_mtime)
        if self.home is not None:
            self._refresh_launched(self.home)

    def _refresh_launched(self, home: RunHome) -> None:
        with suppress(RoadtrainError):
            state = home.state()
            self.phase, self.processes, self.committed = state.phase, state.processes, state.step
            if not any(node.role != "supervisor" for node in self.nodes) and not self.unasked:
                self.job = self._job()  # once the run has started, with the addresses of servers
                self._follow_nodes()

    @property
    def durable(self) -> int:
        """The last step that is known to survive a crash; -1 for none."""
        return max(self.lines.durable, mark_record(self.directory).step, self.committed)

    @property
    def began(self) -> float:
        """When the processes that train were started, in seconds since 1970; 0.0 if unknown."""
        since = [0.0, *(process.since for process in self.processes)]
        with suppress(OSError):
            since.append((self.directory / "job.toml").stat().st_mtime)  # written at each start
        for store in map(Path, self.job.store.files):
            with suppress(OSError, psutil.NoSuchProcess):
                since += [psutil.Process(pid).create_time() for pid in [holder_of(store)] if pid]
        return max(since)

    @property
    def quiet_s(self) -> float:
        """The seconds since the last line of this session, or since its start."""
        return time.time() - max(self.changed, self.began)

    def state(self) -> str:
        """Return "finished", "training", "starting", "stalled", or "not running"."""
        if self.lines.step >= self.job.run.steps:
            return "finished"
        if self.phase == "ended":
            return "not running"
        if self.changed and time.time() - self.changed <= max(LEAST_S, SLOW * self.lines.step_s):
            return "training"
        if not self._is_open():
            return "not running"
        return "starting" if self.began > self.changed and self.quiet_s < FIRST_S else "stalled"

    @property
    def hidden(self) -> str:
        """A sentence about files of the run that are on other hosts; "" if all are here."""
        workers = [process for process in self.processes if process.name.startswith("worker ")]
        away = [worker for worker in workers if int(worker.name.split()[1]) not in self.ranks]
        if not away or len(self.nodes) == 0 or self.nodes[0].role != "supervisor":
            return ""
        hosts = ", ".join(sorted({worker.host for worker in away}))
        return (
            f"steps of {len(away)} of {len(workers)} workers: their files are on {hosts};"
            f" `roadtrain show {self.job.run.dir}` shows them there"
        )

    def notes(self) -> Iterator[str]:
        """Yield a sentence about each thing that cannot be shown."""
        yield from filter(None, (self.hidden, self.unasked))
        servers = [node for node in self.nodes if node.role == "server"]
        if servers and not any(node.intervals for node in servers):
            yield "lanes of servers, which keep them only while they run"

    def _is_open(self) -> bool:
        """Return whether a process has the stores open, or workers are connected to a server."""
        if self.phase:
            return True  # the supervisor has not ended the run
        if servers := [node for node in self.nodes if node.role == "server"]:
            return any(node.text and IDLE not in node.text for node in servers)
        stores = (Path(directory) for directory in self.job.store.files)
        with suppress(OSError):
            return any(is_locked(store) for store in stores if store.is_dir())
        return False

    def by_process(self) -> dict[str, list[Interval]]:
        """Return the intervals of each process, by its name."""
        found = {f"worker {rank}": watch.intervals for rank, watch in sorted(self.ranks.items())}
        intervals = [interval for of_rank in found.values() for interval in of_rank]
        begin = min((interval.begin for interval in intervals), default=0.0)
        for node in self.nodes:
            found[f"{node.role} {node.address}"] = [s for s in node.intervals if s.end > begin]
        return {name: intervals for name, intervals in found.items() if intervals}

    def memory(self) -> dict[int, dict[str, Any]]:
        """Return the memory of each rank after its last step, by rank."""
        last = {rank: watch.lines.recent for rank, watch in sorted(self.ranks.items())}
        return {rank: lines[-1].get("memory", {}) for rank, lines in last.items() if lines}

    def close(self) -> None:
        for node in self.nodes:
            node.over.set()
