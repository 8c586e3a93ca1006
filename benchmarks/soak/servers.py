"""Faults of `roadtrain soak` that strike the stores of servers or the bytes on the servers'
links.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.soak.alone import FLIPPED
from benchmarks.soak.fault import (
    Fault,
    NothingToStrike,
    Reference,
    bytes_until,
    flip_a_bit,
    kill,
    kind,
    refused,
    strike_at,
    unmounted,
)
from benchmarks.soak.job import WorkerArgs, work
from benchmarks.soak.power import Action, Strike, begin, cut
from benchmarks.soak.scene import SERVERS, STEPS, TOKEN, Scene, WorkerLog, Wrong
from roadtrain.storage.generation import open_part

SHORT_S = 3.0
LONG_S = 40.0  # deadline of a job that waits while another is refused
SYNCS = 20  # about the number of syncs of a server in these steps


def _end_servers(scene: Scene, numbers: Sequence[int] = range(SERVERS)) -> None:
    for number in numbers:
        scene.servers[number].kill()
        scene.servers[number].process.join()


def _run_directory(scene: Scene) -> None:
    scene.run = scene.home / "run"
    scene.run.mkdir()


def _train_some(scene: Scene, fault: Fault, reference: Reference) -> None:
    """Train some steps, and then end all servers: after a step if `fault.prompt`, else by killing
    the servers at `fault.moment`. Raises NothingToStrike if no step was committed.
    """
    if fault.prompt:
        scene.finish(steps=1 + fault.choice % (STEPS - 2))
    else:
        scene.start()
        strike_at(scene, fault, reference, lambda: kill(scene, ("server 0", "server 1")), first=0.5)
        scene.wait_struck()
        scene.wait_workers()
    _end_servers(scene)
    if not any(committed > 0 for log in scene.logs() for _, committed, _ in log.steps.values()):
        scene.finish()
        raise NothingToStrike


@kind("bit flipped on a link", ends="any")
def flipped_on_link(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    scene.start()
    link = scene.links[fault.link]
    link.flip(bytes_until(scene, fault, reference), fault.way, fault.choice % 8)
    sentences = scene.wait_workers()
    if not link.flipped:
        raise Wrong("the run sent too few bytes over the link to flip a bit")
    if sentences:
        scene.finish()
    return sentences


@kind("server unmounted", ends="sentence")
def servers_unmounted(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Leave the directory of some servers empty at the next start, as if a disk were not mounted.
    The workers must refuse to go on. Returns the errors of the processes.
    """
    _run_directory(scene)
    _train_some(scene, fault, reference)
    away = [[0], [1], [0, 1]][fault.choice % 3]
    with unmounted([scene.stores[number] for number in away], locks=("lock", ".lock")):
        scene.start(deadline_s=SHORT_S)
        sentences = refused(scene, "GoneError|StaleError|ForeignError")
        _end_servers(scene)
    scene.finish()
    return sentences


@kind("stale replica", ends="any")
def stale(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Kill one of two replicas, which then misses some steps and must not train alone later.
    Returns the errors of the processes.
    """
    scene.replicas = 2
    _run_directory(scene)
    old = fault.choice % SERVERS
    scene.start()
    strike_at(scene, fault, reference, lambda: kill(scene, [f"server {old}"]), first=0.6)
    scene.wait_struck()
    sentences = scene.wait_workers()
    scene.servers[old].process.join()
    scene.start(steps=STEPS - 1, without=old)
    # so early that the remaining replica cannot know whether the other went on
    if refusal := scene.wait_workers():
        before_all = "a new store needs all"  # nothing was committed before the kill
        if not any("give_up=" in sentence or before_all in sentence for sentence in refusal):
            raise Wrong(f"the run does not go on with one of two replicas: {' | '.join(refusal)}")
        scene.finish()
        return sentences + refusal
    _end_servers(scene, [1 - old])
    if fault.prompt:
        scene.serve(old)
        scene.start(without=1 - old)
        time.sleep(0.1 + fault.choice % 1000 / 1000)
        scene.serve(1 - old)
        scene.finished()
    else:
        scene.start(without=1 - old, deadline_s=SHORT_S)
        sentences += scene.wait_workers()
        steps = [
            step for log in scene.logs() for attempt, step in log.steps if attempt == scene.attempt
        ]
        if steps or len(scene.logs()[0].errors) < 1:
            raise Wrong(f"a replica that is behind trained steps {steps} without the other replica")
        scene.finish()
    _same(scene)
    return sentences


def _same(scene: Scene) -> None:
    """Check that both replicas have the same step and the same optimizer state, bit for bit. Raises
    Wrong if they differ.
    """
    _end_servers(scene)
    tiers = [open_part(path) for path in scene.stores]
    try:
        assert all(tier is not None for tier in tiers)
        rows = [
            [(int(row["chunk"]), int(row["state_sum"])) for row in tier.entry.rows]
            for tier in tiers
            if tier
        ]
        if rows[0] != rows[1] or len({tier.step for tier in tiers if tier}) != 1:
            raise Wrong(f"the replicas differ: {rows}")
    finally:
        for tier in tiers:
            if tier is not None:
                tier.close()


@kind("second servers")
def second(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Start a second job on the servers of the first or (unless `fault.prompt`) on their
    directories. Returns the error of the second job.
    """
    scene.start(deadline_s=LONG_S)
    link = scene.links[fault.link]
    # called in the link's own thread, so nothing more passes
    strike_at(scene, fault, reference, link._going.clear)
    scene.wait_struck()
    servers = scene.servers
    if not fault.prompt:
        logs = [scene.home / f"second{number}.log" for number in range(SERVERS)]
        servers = [scene.listening(number, 0, log) for number, log in enumerate(logs)]
    where = tuple(server.where for server in servers)
    log = scene.home / "other.log"
    args = WorkerArgs(scene.flavour, where, 0, 1, 7, STEPS, str(log), SHORT_S)
    node = scene.started(work, (args, TOKEN), log)
    scene.join(node, "the worker of the second job to end")
    job_log = WorkerLog.read(log)
    if job_log.steps or 7 not in job_log.errors:
        raise Wrong(f"a second job was not refused: {job_log}")
    link.resume()
    scene.finished()
    return [job_log.errors[7]]


@kind("server's bit flipped", ends="any")
def flipped(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    """Flip a bit in a file of a server's store between two starts. Returns the errors of the
    processes.
    """
    _run_directory(scene)
    _train_some(scene, fault, reference)
    rng = random.Random(fault.choice)
    root = scene.stores[int(fault.victims[0][-1])]
    name = rng.choice(FLIPPED[:-1])
    paths = sorted(path for path in root.rglob(name) if path.stat().st_size)
    if not paths:
        raise Wrong(f"no {name} below {root}")
    mend = flip_a_bit(scene, paths, rng)
    scene.start(deadline_s=SHORT_S)
    sentences = scene.wait_workers()
    if sentences:
        _end_servers(scene)
        mend()
        scene.finish()
    return sentences


@kind("server's power cut", ends="any")
def power_cut(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    return _with_power(
        scene, fault, ("kill before", "kill after", "kill half"), again=bool(fault.choice % 2)
    )


@kind("server's device fails", ends="any")
def fails(scene: Scene, fault: Fault, reference: Reference) -> list[str]:
    return _with_power(scene, fault, ("EIO",), again=False)


def _with_power(scene: Scene, fault: Fault, actions: Sequence[Action], *, again: bool) -> list[str]:
    """Kill one server, or let its disk fail, at a sync or write, and then cut its power. Returns
    the errors of the workers. `again`: before the power cut, restart the server and kill it once
    more.
    """
    rng = random.Random(fault.choice)
    victim = int(fault.victims[0][-1])
    for number, path in enumerate(scene.stores):
        path.mkdir()
        scene.shadows[number] = scene.home / f"shadow{number}"
        begin(scene.shadows[number], [path])
    action = rng.choice(actions)
    of: Any = "write" if action == "kill half" or rng.random() < 0.4 else "sync"
    scene.strikes[victim] = [
        Strike(of, int(fault.moment * SYNCS), action, rng.choice(("", "", "ledger")))
    ]
    scene.start(steps=STEPS - 1)  # so that a step is left that needs all workers
    sentences = scene.ended_workers()
    if again:
        scene.strikes[victim] = [Strike("sync", rng.randrange(12), "kill before")]
        _end_servers(scene, [victim])
        scene.start(steps=STEPS - 1)
        sentences += scene.ended_workers()
    cuts = range(SERVERS) if fault.prompt else [victim]
    _end_servers(scene, cuts)
    for number in cuts:
        left = cut(scene.shadows[number], [scene.stores[number]], rng)
        scene.note(f"power cut of server {number}: {left}")
    scene.finish()
    return sentences
