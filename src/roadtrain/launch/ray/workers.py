"""Workers by Ray Train: a trainer for each attempt, whose train function runs one `train` as a
process of its own.

Ray places: a bundle a worker, each bound to a node by its id, so that the plan's hosts get exactly
their workers. Which of a node's workers a train function runs is told by WorkerMailbox: Ray counts
ranks in an order of its own, and counts nodes that share an address as one.

Workers are started again by our supervisor with a new trainer, not by Ray's FailureConfig: the next
attempt may run on other hosts and has another number, both are the supervisor's to say, before it
happens. So Ray is told to give up at the first failure.

Where Ray Train is private: two callbacks are left out. The cleaner of placement groups asks a
dashboard for 10 s at each end, and its work is done by the end of this driver; the watcher of
preempted nodes does what nodes.py does.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import PlacementGroupID
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

from roadtrain.errors import LaunchError
from roadtrain.launch.processes import Process, WorkerSet
from roadtrain.launch.protocol.run_events import ProcessEnded, WorkersEnded
from roadtrain.launch.ray.held_process import (
    END_S,
    KILLED,
    HeldProcess,
    ProcessEvent,
    to_ray_log,
)
from roadtrain.launch.ray.nodes import RayNode
from roadtrain.launch.worker_run import WorkerRun

ANSWER_S = 60.0  # an actor that is alive answers within it
TURN_S = 0.5  # between a worker's questions whether it is to end
HEALTH_S = "0.5"  # between looks of Ray Train at its workers
START_S = 60  # Ray Train gives up workers that have no place within it
BEGIN_S = 3.0 * START_S  # and we give up Ray Train that neither begins them nor says why
# All have ended, or were killed: Ray Train has said so within it. Shorter than the state machine's
# patience with workers that were asked to end (run_state.py: KILL_S).
LET_GO_S = 40.0
FAILED = 1
LEFT_OUT = {"PlacementGroupCleanerCallback"}
# Where a worker asks Ray for no device, it sees those of its node, whatever the node was told.
SEES_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": HEALTH_S,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{START_S}",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class AllDevicesSeen(Backend):
    """Each worker sees all devices that its host's workers have, and takes that of LOCAL_RANK."""

    share_cuda_visible_devices = True


class NoGroups(BackendConfig):
    """No process group is Ray's: `train` makes its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return AllDevicesSeen


class WorkerTrainer(DataParallelTrainer):
    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        return [one for one in made if type(one).__name__ not in LEFT_OUT]


def run_worker(config: Mapping[str, Any]) -> None:
    """The train function, on a node: one worker from its beginning to its end. Raises LaunchError
    where that is no good one, unless the worker was asked to end: Ray Train would kill the others,
    which finish their step."""
    mailbox, attempt = config["mailbox"], config["attempt"]
    node = ray.get_runtime_context().get_node_id()
    process = ray.get(mailbox.take.remote(attempt, node), timeout=ANSWER_S)
    if process is None:
        raise LaunchError(f"attempt {attempt} has no worker left for node {node[:8]}")
    said: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
    held = HeldProcess(process, config["mark"], said.put)
    try:
        ended, asked = _follow(held, said, mailbox, attempt)
    finally:
        held.stop(0.0)
        held.wait(END_S)
    if ended.code and not asked:
        raise LaunchError(f"{process.name} ended with code {ended.code}: {ended.last_line}")


def _follow(
    held: HeldProcess, said: queue.SimpleQueue[ProcessEvent], mailbox: Any, attempt: int
) -> tuple[ProcessEnded, bool]:
    """Its end, and whether it was asked to end before."""
    obeyed = None
    while True:
        events = _drained(said)
        for event in events:
            to_ray_log(event, held.process.host)
        grace_s = ray.get(mailbox.post.remote(attempt, events), timeout=ANSWER_S)
        for event in events:
            if isinstance(event, ProcessEnded):
                return event, obeyed is not None
        if not held.alive and said.empty():
            lost = ProcessEnded(held.process.name, KILLED, "nobody told its end")
            return lost, obeyed is not None
        if grace_s is not None and grace_s != obeyed:
            obeyed = grace_s
            held.stop(grace_s)


def _drained(said: queue.SimpleQueue[ProcessEvent]) -> list[ProcessEvent]:
    try:
        events = [said.get(timeout=TURN_S)]
    except queue.Empty:
        return []
    while not said.empty():
        events.append(said.get())
    return events


class RayWorkers:
    """The workers of an attempt, as the supervisor sees them. mailbox: an actor WorkerMailbox that
    offers them. fit: runs them, to the end of the last."""

    def __init__(self, workers: WorkerSet, mailbox: Any, fit: Callable[[], object]) -> None:
        self.attempt = workers.attempt
        self._mailbox = mailbox
        self._run = WorkerRun(
            workers.attempt, {process.name: process.host for process in workers.processes}
        )
        self._first = workers.processes[0].name
        self._waited_for = set(self._run.hosts)  # those that have not begun
        self._begin_by = time.monotonic() + BEGIN_S
        self._let_go_by: float | None = None  # all have ended, or are to
        self._ended: WorkersEnded | None = None
        self._why = ""  # the last word on the end of those whose own was not heard
        self._thread = threading.Thread(
            target=self._fit, args=(fit,), name=f"attempt {self.attempt}", daemon=True
        )
        self._thread.start()

    def _fit(self, fit: Callable[[], object]) -> None:
        try:
            fit()
        except Exception as error:
            self._why = self._why or _last_line(error) or repr(error)

    def stop(self, grace_s: float) -> None:
        self._run.stopping = True
        self._order(grace_s)

    def lose(self, host: str) -> None:
        """All that ran on it has ended: nobody else would say so."""
        why = f"its host {host} was lost"
        for name in [name for name, where in self._run.hosts.items() if where == host]:
            self.take(ProcessEnded(name, KILLED, why))

    def begun(self, name: str) -> bool:
        """A worker has begun. Returns whether it is that of rank 0."""
        self._waited_for.discard(name)
        return name == self._first

    def take(self, ended: ProcessEnded) -> None:
        """A worker has ended."""
        if ended.name not in self._run.hosts:
            return
        last = len(self._run.hosts) == 1
        kill = self._run.end(ended.name, ended.code, ended.last_line, time.monotonic())
        if last:
            self._ended = self._run.ended()
            self._let_go_within(LET_GO_S)
        elif kill:
            self._order(0.0)

    def _order(self, grace_s: float) -> None:
        """That they end."""
        self._mailbox.order.remote(self.attempt, grace_s)
        self._let_go_within(grace_s + LET_GO_S)

    def _let_go_within(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        self._let_go_by = min(self._let_go_by or until, until)

    def is_over(self) -> bool:
        """Whether Ray Train has let go of their places, or is given up: all that they said is in
        the mailbox. Rule 5: no wait for it is without a deadline."""
        at = time.monotonic()
        if not self._thread.is_alive():
            return True
        if self._run.end_late(at):
            self._order(0.0)
        if self._waited_for and self._let_go_by is None and at > self._begin_by:
            late = ", ".join(sorted(self._waited_for))
            self._why = f"Ray Train has not begun {late} within {BEGIN_S:.0f} s"
            self._order(0.0)
        if self._let_go_by is None or at < self._let_go_by:
            return False
        self._why = self._why or f"Ray Train has not let go of it within {LET_GO_S:.0f} s"
        return True

    def ended(self) -> WorkersEnded:
        """Of workers that are over, all whose news was taken."""
        for name in list(self._run.hosts):  # lost with their nodes, or never begun
            self._run.end(name, KILLED if self._why else FAILED, self._why, time.monotonic())
        self._ended = self._ended or self._run.ended()
        assert self._ended is not None
        return self._ended


def ray_workers(
    workers: WorkerSet,
    nodes: Mapping[str, RayNode],
    mailbox: Any,
    mark: str,
    directory: Path | None = None,
) -> RayWorkers:
    """Begins them. directory: for what Ray Train writes. Raises LaunchError where a node has too
    few devices for them."""
    places: dict[str, list[Process]] = {}
    for process in workers.processes:
        places.setdefault(nodes[process.host].node_id, []).append(process)
    config = {"mailbox": mailbox, "attempt": workers.attempt, "mark": mark}
    trainer = trainer_of(places, nodes, config, mark, directory)
    mailbox.offer.remote(workers.attempt, places)
    return RayWorkers(workers, mailbox, trainer.fit)


def trainer_of(
    places: Mapping[str, Sequence[Process]],
    nodes: Mapping[str, RayNode],
    config: Mapping[str, Any],
    mark: str,
    directory: Path | None = None,
) -> WorkerTrainer:
    by_id = {node.node_id: node for node in nodes.values()}
    each = {"CPU": 1}
    with_devices = sum(by_id[node].devices > 0 for node in places)
    mixed = 0 < with_devices < len(places)  # Ray Train asks for the same for each worker
    if with_devices == len(places):
        each["GPU"] = 1
    for node, processes in places.items():
        has = {"CPU": by_id[node].processors, "GPU": by_id[node].devices}
        short = next((one for one in each if has[one] < len(processes)), "")
        if short:
            raise LaunchError(
                f"{len(processes)} workers are to run on {processes[0].host}, whose Ray node has"
                f" {has[short]} {short}",
                hint="`ray start --num-cpus` or `--num-gpus` says what a node has",
            )
    return WorkerTrainer(
        run_worker,
        train_loop_config=dict(config),
        backend_config=NoGroups(),
        scaling_config=ScalingConfig(
            num_workers=sum(map(len, places.values())),
            use_gpu="GPU" in each,
            resources_per_worker=each,
            label_selector=[
                {ray._raylet.RAY_NODE_ID_KEY: node}
                for node, processes in places.items()
                for _ in processes
            ],
        ),
        run_config=RunConfig(
            storage_path=None if directory is None else str(directory),
            name=f"{mark}-{config['attempt']}".replace("/", "-").replace(":", "-"),
            failure_config=FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
            worker_runtime_env={"env_vars": SEES_DEVICES} if mixed else None,
        ),
    )


def threads_of(workers: WorkerSet, nodes: Mapping[str, RayNode]) -> dict[str, int]:
    """Threads of each worker, by host: its share of its node's processors. Ray would give it one,
    as it has one processor. Nodes of one machine share its processors: threads that wait for each
    other's processor are several times as slow."""
    on = Counter(nodes[process.host].host_name for process in workers.processes)
    return {
        process.host: max(1, nodes[process.host].processors // on[nodes[process.host].host_name])
        for process in workers.processes
    }


def remove_old_places() -> None:
    """Of attempts of this driver that are over: Ray Train keeps those of a controller that died or
    was given up, and the next attempt would wait for them."""
    job = ray.get_runtime_context().get_job_id()
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def set_environment() -> None:
    """Of this process, before Ray Train reads it; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
