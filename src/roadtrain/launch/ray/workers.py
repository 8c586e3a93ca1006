"""Run the workers with Ray Train. Each attempt has a trainer, and each train function of the
trainer runs one `train` process.

The resources of a worker are bound to a node, so that each host of the plan gets exactly its
workers. A train function gets its worker from WorkerMailbox, because Ray assigns ranks in its own
order. Ray Train stops at the first failure, and the supervisor restarts the workers with a new
trainer, because it must announce the restart and may choose other hosts. Two private callbacks of
Ray Train are disabled: the cleanup of placement groups, which is slow and not needed, and the watch
for preempted nodes, which nodes.py does.
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

ANSWER_S = 60.0  # timeout of a call to an actor
TURN_S = 0.5  # interval at which a train function asks whether its worker must end
HEALTH_S = "0.5"  # interval of Ray Train's health checks of its workers
START_S = 60  # timeout of Ray Train for placing the workers
BEGIN_S = 3.0 * START_S  # timeout for Ray Train to start the workers
# Timeout for Ray Train to finish after all workers have ended. Must be shorter than KILL_S of
# run_state.py, the time after which the state machine stops waiting for the workers' end.
LET_GO_S = 40.0
FAILED = 1  # exit code of a worker that Ray Train ended without a reason
LEFT_OUT = {"PlacementGroupCleanerCallback"}  # class names of the callbacks that are disabled
# Makes the GPUs of a node visible to workers that request no GPU from Ray.
SEES_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": HEALTH_S,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{START_S}",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class AllDevicesSeen(Backend):
    """A backend of Ray Train that makes the devices of all workers on a node visible to each of
    them. A worker uses the device with the number LOCAL_RANK."""

    share_cuda_visible_devices = True


class NoGroups(BackendConfig):
    """A backend configuration without a torch.distributed process group, because `train` creates
    its own."""

    @property
    def backend_cls(self) -> type[Backend]:
        return AllDevicesSeen


class WorkerTrainer(DataParallelTrainer):
    """A trainer of Ray Train without the callback that cleans up placement groups."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if type(callback).__name__ not in LEFT_OUT]


def run_worker(config: Mapping[str, Any]) -> None:
    """Run one worker to its end, as the train function of Ray Train. Raises LaunchError if the
    worker fails without a stop request. (After a stop request, Ray Train would kill the other
    workers, which must finish their step.)"""
    mailbox, attempt = config["mailbox"], config["attempt"]
    node = ray.get_runtime_context().get_node_id()
    process = ray.get(mailbox.take.remote(attempt, node), timeout=ANSWER_S)
    if process is None:
        raise LaunchError(f"no worker is left to start on node {node[:8]} in attempt {attempt}")
    pending: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
    held = HeldProcess(process, config["mark"], pending.put)
    try:
        ended, stopped = _follow(held, pending, mailbox, attempt)
    finally:
        held.stop(0.0)
        held.wait(END_S)
    if ended.code and not stopped:
        raise LaunchError(f"{process.name} ended with code {ended.code}: {ended.last_line}")


def _follow(
    held: HeldProcess, pending: queue.SimpleQueue[ProcessEvent], mailbox: Any, attempt: int
) -> tuple[ProcessEnded, bool]:
    """Post the events of a worker to the mailbox until the worker ends. Return its ProcessEnded,
    and True if it was asked to end."""
    obeyed = None  # grace period of the stop request that was carried out
    while True:
        events = _drained(pending)
        for event in events:
            to_ray_log(event, held.process.host)
        grace_s = ray.get(mailbox.post.remote(attempt, events), timeout=ANSWER_S)
        for event in events:
            if isinstance(event, ProcessEnded):
                return event, obeyed is not None
        if not held.alive and pending.empty():
            lost = ProcessEnded(held.process.name, KILLED, "the worker's end was not reported")
            return lost, obeyed is not None
        if grace_s is not None and grace_s != obeyed:
            obeyed = grace_s
            held.stop(grace_s)


def _drained(pending: queue.SimpleQueue[ProcessEvent]) -> list[ProcessEvent]:
    try:
        events = [pending.get(timeout=TURN_S)]
    except queue.Empty:
        return []
    while not pending.empty():
        events.append(pending.get())
    return events


class RayWorkers:
    """The workers of an attempt, as the supervisor sees them. `fit`: function that runs the workers
    and returns when all of them have ended."""

    def __init__(self, workers: WorkerSet, mailbox: Any, fit: Callable[[], object]) -> None:
        self.attempt = workers.attempt
        self._mailbox = mailbox
        self._run = WorkerRun(
            workers.attempt, {process.name: process.host for process in workers.processes}
        )
        self._first = workers.processes[0].name
        self._not_begun = set(self._run.hosts)  # names of workers that have not started
        self._begin_by = time.monotonic() + BEGIN_S
        self._let_go_by: float | None = None  # deadline of Ray Train, set when workers must end
        self._ended: WorkersEnded | None = None
        self._why = ""  # reason to give for workers whose end is not reported
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
        """Record that the workers on a lost host have ended, because nothing else reports it."""
        why = f"its host {host} was lost"
        for name in [name for name, where in self._run.hosts.items() if where == host]:
            self.take(ProcessEnded(name, KILLED, why))

    def begun(self, name: str) -> bool:
        """Record the start of a worker. Return True if it has rank 0."""
        self._not_begun.discard(name)
        return name == self._first

    def take(self, ended: ProcessEnded) -> None:
        """Record the end of a worker."""
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
        self._mailbox.order.remote(self.attempt, grace_s)
        self._let_go_within(grace_s + LET_GO_S)

    def _let_go_within(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        self._let_go_by = min(self._let_go_by or until, until)

    def is_over(self) -> bool:
        """Return True if Ray Train has released the resources of the workers, or if the time limit
        for the release has passed. Then all events of the workers are in the mailbox."""
        at = time.monotonic()
        if not self._thread.is_alive():
            return True
        if self._run.end_late(at):
            self._order(0.0)
        if self._not_begun and self._let_go_by is None and at > self._begin_by:
            late = ", ".join(sorted(self._not_begun))
            self._why = f"Ray Train has not started {late} within {BEGIN_S:.0f} s"
            self._order(0.0)
        if self._let_go_by is None or at < self._let_go_by:
            return False
        self._why = self._why or f"Ray Train has not released the worker within {LET_GO_S:.0f} s"
        return True

    def ended(self) -> WorkersEnded:
        """Return the result of the attempt. Call this method after `is_over` has returned True and
        all events were handled."""
        for name in list(self._run.hosts):  # workers that were lost with their nodes or not started
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
    """Start the workers of an attempt. `nodes`: the node of each host. `mark`: the name of the run
    on the cluster. `directory`: the directory for files of Ray Train. Raises LaunchError if a node
    has too few processors or devices."""
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
    mixed = 0 < with_devices < len(places)  # all workers must have equal resource requests
    if with_devices == len(places):
        each["GPU"] = 1
    for node, processes in places.items():
        has = {"CPU": by_id[node].processors, "GPU": by_id[node].devices}
        short = next((resource for resource in each if has[resource] < len(processes)), "")
        if short:
            raise LaunchError(
                f"host {processes[0].host} has {len(processes)} workers in the plan, but only"
                f" {has[short]} {short} in Ray",
                hint="set the node's resources with `ray start --num-cpus` or `--num-gpus`",
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
    """Return the number of threads per worker for each host: equal shares of the processors of a
    machine, even if several nodes run on it. (By default, Ray gives a worker one thread.)"""
    on = Counter(nodes[process.host].host_name for process in workers.processes)
    return {
        process.host: max(1, nodes[process.host].processors // on[nodes[process.host].host_name])
        for process in workers.processes
    }


def remove_old_places() -> None:
    """Remove the placement groups that Ray Train has left of earlier attempts, because the next
    attempt would wait for their resources."""
    job = ray.get_runtime_context().get_job_id()
    for name, group in placement_group_table().items():
        if name.endswith(job) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def set_environment() -> None:
    """Set the environment variables of Ray Train that the user has not set. Must be called before
    Ray Train is used."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
