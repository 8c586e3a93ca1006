"""measure_run(): what a run's hosts and workers showed, asked through its engine once its processes
have ended: the links between its hosts, and the seconds of its workers' last steps.

    each host but one     a process that listens (measured_host.py), with the run's token
    that one              is asked to measure all links, MOST hosts at a time
    each host of workers  is asked for its workers' metrics

Hosts that share an address have no link between them. What cannot be measured is named, with the
reason; it is no error. Does NOT judge what it finds (measured_cluster.py).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from roadtrain.config.machines import host_port
from roadtrain.errors import LaunchError
from roadtrain.launch.launch_engine import LaunchEngine
from roadtrain.launch.measured_cluster import LinkSeen
from roadtrain.launch.measured_host import MODULE, HostAnswer, Told, WorkerSeconds
from roadtrain.launch.processes import HostFile, Process, Role
from roadtrain.launch.protocol.run_events import ProcessEnded
from roadtrain.launch.resolve import ResolvedRun

MOST = 8  # hosts whose links one asking host measures: 56 of them, about 40 s
END_S = 20.0  # for processes that listen to end


class MeasuredWorker(msgspec.Struct, frozen=True):
    host: str
    seconds: WorkerSeconds


class MeasuredRun(msgspec.Struct, frozen=True):
    """measured.json. `links`: between hosts by their names."""

    links: tuple[LinkSeen, ...] = ()
    workers: tuple[MeasuredWorker, ...] = ()
    missing: tuple[str, ...] = ()
    shared: bool = False  # all hosts have one run directory

    @property
    def seconds(self) -> float:
        """Of a step: it ends when the last worker has ended it."""
        return max((one.seconds.seconds for one in self.workers), default=0.0)


def measure_run(engine: LaunchEngine, run: ResolvedRun, worker_hosts: Sequence[str]) -> MeasuredRun:
    """worker_hosts: of the last attempt, in the order of ranks. None of the run's processes is
    running."""
    here = {host.name for host in engine.hosts()}
    every = [one.name for one in (*run.machines.hosts, *run.machines.spares) if one.name in here]
    missing = [
        f"host {one.name}, which does not answer"
        for one in run.machines.hosts
        if one.name not in here
    ]
    links: list[LinkSeen] = []
    meeting = _of_addresses(run, every)
    listening, started = _listening(run, meeting[1:]), list[str]()
    try:
        for process, _ in listening.values():
            engine.start(process)
            started.append(process.name)
        for asking, others in _groups(meeting):
            places = {listening[one][1]: one for one in others}
            told = Told(token=run.token, others=list(places))
            said = engine.ask(asking, ("-m", MODULE), msgspec.to_builtins(told))
            found = msgspec.convert(said, HostAnswer)
            names = {"here": asking, **places}
            links += [LinkSeen(names[a], names[b], *seen) for a, b, *seen in found.links]
            for why in found.missing:
                for where, name in names.items():
                    why = why.replace(where, name)
                missing.append(why)
    except LaunchError as error:
        missing.append(str(error).partition("\n")[0])
    finally:
        _end(engine, started)
    workers = tuple(_workers(engine, run, worker_hosts, missing))
    return MeasuredRun(tuple(links), workers, tuple(missing), run.shared)


def _of_addresses(run: ResolvedRun, names: Sequence[str]) -> list[str]:
    """One host of each address."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(run.address(name), name)
    return list(first.values())


def _groups(names: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """An asking host and those that listen; groups share a host, so that each host of one meets one
    of the next."""
    for begin in range(0, len(names) - 1, MOST - 1):
        yield names[begin], names[begin + 1 : begin + MOST]


def _listening(run: ResolvedRun, names: Sequence[str]) -> dict[str, tuple[Process, str]]:
    """Host -> its process that listens, and where."""
    out: dict[str, tuple[Process, str]] = {}
    taken = {port for host in run.machines.hosts for port in host.ports}
    planned = run.machines.rendezvous_port
    ports = itertools.chain(range(planned + 1, 65536), range(1024, planned))
    port = next(number for number in ports if number not in taken)
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
        names = [f"metrics.{one}.jsonl" if one else "metrics.jsonl" for one in ranks]
        told = Told(metrics=[str(Path(run.job.run.dir, name)) for name in names])
        rank += count
        try:
            said = engine.ask(host, ("-m", MODULE), msgspec.to_builtins(told))
        except LaunchError as error:
            missing.append(f"steps of {host}: {str(error).partition(chr(10))[0]}")
            continue
        for seconds in msgspec.convert(said, HostAnswer).workers:
            yield MeasuredWorker(host, seconds)


def slower(measured: MeasuredRun) -> dict[str, float]:
    """Host -> how many times as long as predicted its slowest worker computes (Forward and
    Backward, without waiting). A host whose workers have no prediction is left out."""
    out: dict[str, float] = {}
    for one in measured.workers:
        planned, took = computing(one.seconds.predicted), computing(one.seconds.stages)
        if planned and took:
            out[one.host] = max(out.get(one.host, 0.0), took / planned)
    return out


def computing(stages: Mapping[str, float]) -> float:
    return stages.get("Forward", 0.0) + stages.get("Backward", 0.0)
