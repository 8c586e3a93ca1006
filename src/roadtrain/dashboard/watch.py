"""RunWatch follows one run: the metrics and timelines of all its processes, its servers, and for a
launched run its supervisor. Nothing is written. Does not import torch or Bokeh."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from roadtrain.config.job import Job, job_of_run, load_job
from roadtrain.errors import ConfigError, PeerError, RoadtrainError
from roadtrain.launch.home import ProcessRow, RunHome
from roadtrain.launch.host_report import is_locked, mark_record
from roadtrain.launch.status_command import launched
from roadtrain.servers import health
from roadtrain.servers.trace import Interval
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.training.run_lines import LineTail, RunLines
from roadtrain.training.status import names_servers
from roadtrain.training.timeline import before_of, timeline_of
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.tcp import Address, TcpOptions

ASK_EVERY_S, ANSWER_S = 0.3, 1.0  # pause between two queries of a server, and its time to answer
SILENT_S = 1.5  # a server that has not answered for so long is reported
INTERVALS_EVERY_S = 2.0
STEPS = 8  # the timeline shows so many steps
SLOW = 10.0  # a run is stalled if a step takes so many times the median
LEAST_S = 10.0  # but not before
TAIL_BYTES = 2**18  # of the files of which only the last lines are shown
RANK_FILE = re.compile(r"metrics(?:\.(\d+))?\.jsonl")
IDLE = "no session"  # in the status of a server without workers


@dataclass
class NodeWatch:
    """A server or a spare host, and its last answer, which a thread updates."""

    role: str
    address: str
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
        if silent_s < SILENT_S:
            return ""
        return f"has not answered for {silent_s:.1f} s ({self.error or 'it is still asked'})"

    def follow(self, options: TcpOptions) -> None:
        """Start to query the node in a thread of its own, until `over` is set."""
        where = address_of(self.address)
        threading.Thread(
            target=self._ask, args=(where, options), name=f"asks {self.address}", daemon=True
        ).start()

    def _ask(self, where: Address, options: TcpOptions) -> None:
        intervals_at = 0.0
        while not self.over.wait(ASK_EVERY_S):
            status = health.ask(where, options, answer_s=ANSWER_S)
            if isinstance(status, PeerError):
                self.error = str(status).partition("\n")[0]
                continue
            self.text, self.waits, self.error = status[0], dict(status[1]), ""
            self.answered = time.monotonic()
            if self.role == "server" and time.monotonic() - intervals_at > INTERVALS_EVERY_S:
                intervals_at = time.monotonic()
                how = {"hello": health.ASK_INTERVALS, "kind": list[Interval]}
                found = health.ask(where, options, answer_s=ANSWER_S, **how)
                self.intervals = self.intervals if isinstance(found, PeerError) else found


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
                earlier = [item for item in self.steps.items() if item[0] < step]
                self.steps = dict([*earlier, (step, own)])  # a restarted run repeats steps
        for step in sorted(self.steps)[:-STEPS]:
            del self.steps[step]
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
        if names_servers(run):
            raise ConfigError(
                f"{run} names servers, which know no losses and no steps of workers",
                hint="name the run directory; `roadtrain status HOST:PORT` shows servers",
            )
        if not Path(run).is_dir() and (home := launched(run)) is not None:
            self.home, record = home, home.record()
            self.directory = Path(record.directory, load_job(home.job_path).run.dir)
        else:
            self.directory = Path(run)
            job_of_run(run)  # raises ConfigError
        self.ranks: dict[int, RankWatch] = {}
        self.nodes: list[NodeWatch] = []
        self.processes: Sequence[ProcessRow] = ()
        self.phase, self.changed, self.version = "", 0.0, 0
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
        options = TcpOptions(token=token_of(own.token_file), tls=tls_of(own.cert, own.key, own.ca))
        for role, address in nodes:
            self._follow(NodeWatch(role, address), options)
        if section.reducers:
            options = TcpOptions(token=token_of(section.reducers_token_file))
            for address in SpareHosts(section.reducers, None, None).now():
                self._follow(NodeWatch("spare host", address), options)

    def _follow(self, node: NodeWatch, options: TcpOptions) -> None:
        node.follow(options)
        self.nodes.append(node)

    @property
    def lines(self) -> RunLines:
        return self.ranks[0].lines if 0 in self.ranks else RunLines()

    def refresh(self) -> None:
        """Read what is new since the last call."""
        for path in self.directory.glob("metrics*.jsonl"):
            if found := RANK_FILE.fullmatch(path.name):
                rank = int(found[1] or 0)
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
            self.phase, self.processes = state.phase, state.processes
            if not self.nodes:
                self.job = self._job()  # once the run has started, with the addresses of servers
                self._follow_nodes()

    @property
    def durable(self) -> int:
        """The last step that is known to survive a crash; -1 for none."""
        return max(self.lines.durable, mark_record(self.directory).step)

    @property
    def quiet_s(self) -> float:
        """The seconds since the last line."""
        return time.time() - self.changed if self.changed else 0.0

    def state(self) -> str:
        """Return "finished", "training", "stalled", or "not running"."""
        if self.lines.step >= self.job.run.steps:
            return "finished"
        if self.phase == "ended":
            return "not running"
        if self.changed and self.quiet_s <= max(LEAST_S, SLOW * self.lines.step_s):
            return "training"
        return "stalled" if self._is_open() else "not running"

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
