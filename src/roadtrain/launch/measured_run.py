"""measure_run(): measure the links between a run's hosts and collect the times of its workers' last
steps, after all processes of the run have ended.

    every host but the first     runs a listening process (measured_host.py) with the run's token
    the first host of a group    measures the links between the hosts of the group
    every host with workers      returns a summary of its workers' metrics

A group has at most 8 hosts. A failed measurement is not an error: `MeasuredRun.missing` has the
reason. Does NOT judge the results (measured_cluster.py).
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from roadtrain.config.machines import host_port
from roadtrain.errors import LaunchError
from roadtrain.launch.launch_engine import LaunchEngine
from roadtrain.launch.measured_cluster import MeasuredLink
from roadtrain.launch.measured_host import MODULE, HostAnswer, MeasureRequest, WorkerSeconds
from roadtrain.launch.processes import HostFile, Process, Role
from roadtrain.launch.protocol.run_events import ProcessEnded
from roadtrain.launch.resolve import ResolvedRun

MOST = 8  # largest number of hosts in a group; the 56 links of a group take about 40 s
END_S = 20.0  # how long to wait for the listening processes to end


class MeasuredWorker(msgspec.Struct, frozen=True):
    """The times of a worker's last steps, and the worker's host."""

    host: str
    seconds: WorkerSeconds


class MeasuredRun(msgspec.Struct, frozen=True):
    """The measurements of a run, saved as measured.json."""

    links: tuple[MeasuredLink, ...] = ()  # the ends are host names
    workers: tuple[MeasuredWorker, ...] = ()
    missing: tuple[str, ...] = ()  # failed measurements with their reasons
    shared: bool = False  # True if all hosts share one run directory

    @property
    def seconds(self) -> float:
        """The seconds that a step takes on the slowest worker."""
        return max((worker.seconds.seconds for worker in self.workers), default=0.0)


def measure_run(engine: LaunchEngine, run: ResolvedRun, worker_hosts: Sequence[str]) -> MeasuredRun:
    """Measure the links of a run after its processes have ended, and collect the times of the last
    steps. `worker_hosts`: the hosts of the last attempt, in rank order."""
    here = {host.name for host in engine.hosts()}
    every = [host.name for host in (*run.machines.hosts, *run.machines.spares) if host.name in here]
    missing = [
        f"host {host.name}, which does not answer"
        for host in run.machines.hosts
        if host.name not in here
    ]
    links: list[MeasuredLink] = []
    distinct = _distinct_addresses(run, every)
    listening, started = _listening(run, distinct[1:]), list[str]()
    try:
        for process, _ in listening.values():
            engine.start(process)
            started.append(process.name)
        for prober, others in _groups(distinct):
            places = {listening[other][1]: other for other in others}
            request = MeasureRequest(token=run.token, others=list(places))
            answer = engine.ask(prober, ("-m", MODULE), msgspec.to_builtins(request))
            found = msgspec.convert(answer, HostAnswer)
            names = {"here": prober, **places}
            links += [MeasuredLink(names[a], names[b], *seen) for a, b, *seen in found.links]
            missing += [with_names(why, names) for why in found.missing]
    except LaunchError as error:
        missing.append(str(error).partition("\n")[0])
    finally:
        _end(engine, started)
    workers = tuple(_workers(engine, run, worker_hosts, missing))
    return MeasuredRun(tuple(links), workers, tuple(missing), run.shared)


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Replace the addresses in a text, and the word "here", by the names of their hosts."""
    addresses = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w.:])({addresses})(?!\w)", lambda found: names[found[0]], text)


def _distinct_addresses(run: ResolvedRun, names: Sequence[str]) -> list[str]:
    """Return the hosts in `names`, but only the first of several hosts with the same address."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(run.address(name), name)
    return list(first.values())


def _groups(names: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the host that probes and the hosts that listen, for each group. Consecutive groups
    share a host."""
    for begin in range(0, len(names) - 1, MOST - 1):
        yield names[begin], names[begin + 1 : begin + MOST]


def _listening(run: ResolvedRun, names: Sequence[str]) -> dict[str, tuple[Process, str]]:
    """Return for each host in `names` a process that listens on the host, and its ADDRESS:PORT."""
    out: dict[str, tuple[Process, str]] = {}
    used = {port for host in run.machines.hosts for port in host.ports}
    planned = run.machines.rendezvous_port
    ports = itertools.chain(range(planned + 1, 65536), range(1024, planned))
    port = next(number for number in ports if number not in used)
    token = f"{run.directory}/launch/token"
    for name in names:
        where = host_port(run.address(name), port)
        out[name] = (
            Process(
                f"links of {name}",
                Role.SERVER,
                name,
                ("-m", MODULE, where, token),
                run.directory,
                files=(HostFile(token, run.token, secret=True),),
                ports=(port,),
            ),
            where,
        )
    return out


def _end(engine: LaunchEngine, names: Sequence[str]) -> None:
    for name in names:
        engine.stop(name, 1.0)
    waited, until = set(names), time.monotonic() + END_S
    while waited and time.monotonic() < until:
        events = engine.events(0.2)
        waited -= {event.name for event in events if isinstance(event, ProcessEnded)}


def _workers(
    engine: LaunchEngine, run: ResolvedRun, hosts: Sequence[str], missing: list[str]
) -> Iterator[MeasuredWorker]:
    rank = 0
    for host, count in run.workers_on(hosts):
        ranks = range(rank, rank + count)
        names = [f"metrics.{rank}.jsonl" if rank else "metrics.jsonl" for rank in ranks]
        request = MeasureRequest(metrics=[str(Path(run.job.run.dir, name)) for name in names])
        rank += count
        try:
            answer = engine.ask(host, ("-m", MODULE), msgspec.to_builtins(request))
        except LaunchError as error:
            missing.append(f"steps of {host}: {str(error).partition(chr(10))[0]}")
            continue
        for seconds in msgspec.convert(answer, HostAnswer).workers:
            yield MeasuredWorker(host, seconds)


def slower(measured: MeasuredRun) -> dict[str, float]:
    """Return for each host the compute time per step of its slowest worker, divided by the
    predicted compute time. Hosts without predictions are omitted."""
    out: dict[str, float] = {}
    for worker in measured.workers:
        planned, took = computing(worker.seconds.predicted), computing(worker.seconds.stages)
        if planned and took:
            out[worker.host] = max(out.get(worker.host, 0.0), took / planned)
    return out


def computing(stages: Mapping[str, float]) -> float:
    """Return the seconds of the stages Forward and Backward together."""
    return stages.get("Forward", 0.0) + stages.get("Backward", 0.0)
