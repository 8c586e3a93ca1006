"""Run tasks on a virtual clock. A task uses resources of limited capacity, which concurrent tasks
share.

A *resource* has a capacity per second: one direction of a link, an SSD's reads, memory bandwidth. A
*task* has `work` and `uses`: a list of resources, each with a weight. Each unit of work takes the
weight's amount from each of these resources, at the same time. Running tasks share resources by
weighted max-min fairness (progressive filling): all rates grow equally until a resource is full or
a task reaches its `max_rate`. A *lane* (a CUDA stream, a pool of CPUs) runs one task at a time: the
waiting task with the smallest `priority`, and among equals the task that was created first.

Ties are broken by the order of creation, so results are reproducible. The engine knows nothing
about models, plans or bytes. All times are in seconds.

    engine = Engine()
    link = engine.resource("host 0 out", 12.5e9)
    first = engine.task("Push", Cost(25e9, [(link, 1)]))
    engine.task("Update", Cost(0.5), lane=engine.lane("cpu"), after=[first])
    engine.run()                                        # engine.now == 2.5
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roadtrain.errors import LoopError

Then = Callable[[], None]
TINY = 1e-12  # relative tolerance for rates, levels and capacities


class Resource:
    """Something that running tasks share, such as one direction of a link. `capacity` is per
    second."""

    __slots__ = ("capacity", "name", "running", "used")

    def __init__(self, name: str, capacity: float) -> None:
        assert capacity > 0, f"{name} has no capacity"  # an infinite capacity never limits a task
        self.name, self.capacity = name, capacity
        # running tasks, and how much of this resource a unit of their work uses
        self.running: dict[Task, float] = {}
        self.used = 0.0  # the total use by tasks that have ended


Uses = list[tuple[Resource, float]]  # how much of each resource a unit of work uses


class Cost(NamedTuple):
    """The work of a task and the resources that it uses."""

    work: float  # in units, often bytes; in seconds if the task uses no resource
    # resources, and how much of each a unit of work uses
    uses: Sequence[tuple[Resource, float]] = ()
    latency: float = 0.0  # seconds before the task starts to use resources
    # in units/s; an infinite rate counts as 1 if the task uses no resource
    max_rate: float = float("inf")

    @property
    def of_bytes(self) -> Cost:
        """The same cost for work that is measured in bytes. Bytes that use no resource take no
        time."""
        return self if self.uses else Cost(0.0, (), self.latency)


def joined(costs: Sequence[Cost]) -> Cost:
    """Return the cost of a single transfer that takes as long as the slowest of simultaneous
    transfers of equal work."""
    uses: dict[Resource, float] = defaultdict(float)
    for cost in costs:
        for resource, weight in cost.uses:
            uses[resource] += weight
    return Cost(costs[0].work, list(uses.items()), max(cost.latency for cost in costs))


class Lane:
    """A queue that runs one task at a time. `busy`: the total seconds of the tasks that have
    ended."""

    __slots__ = ("busy", "name", "running", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: list[tuple[float, int, Task]] = []
        self.running: Task | None = None
        self.busy = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """A unit of work. `begin` and `end`: the times at which the task began and ended; -1 before."""

    stage: str
    work: float
    uses: Sequence[tuple[Resource, float]]
    number: int
    lane: Lane | None = None
    then: Then | None = None
    priority: float = 0.0
    where: str = ""
    latency: float = 0.0
    max_rate: float = float("inf")
    after: int = 0  # number of tasks that have to end before this task begins
    waited_by: list[Task] = field(default_factory=list)
    left: float = 0.0  # remaining work when the rate was last set
    rate: float = 0.0
    since: float = 0.0  # time at which the rate was last set
    stamp: int = 0  # number of rate changes, so that events for older rates are skipped
    begin: float = -1.0
    end: float = -1.0

    @property
    def ended(self) -> bool:
        return self.end >= 0


@dataclass
class Pool:
    """The memory of one device or host. `changes`: pairs of a time and the number of bytes held
    from this time on. No time occurs twice."""

    name: str
    held: float = 0.0
    peak: float = 0.0
    changes: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])


class Engine:
    """A virtual clock, with the resources, lanes and tasks of a simulation."""

    def __init__(self, traced: bool = False) -> None:
        self.now = 0.0
        self.resources: list[Resource] = []
        self.lanes: list[Lane] = []
        self.pools: dict[str, Pool] = {}
        self.trace: list[Task] | None = [] if traced else None
        # (where, stage) -> [seconds, work], the sums over ended tasks
        self.stages: dict[tuple[str, str], list[float]] = {}
        self._open: dict[Task, None] = {}
        self._events: list[tuple[float, int, int, Task]] = []  # (second, number, stamp, task)
        self._dirty: dict[Resource, None] = {}
        self.created = 0  # number of tasks

    # resources, lanes and memory

    def resource(self, name: str, capacity: float) -> Resource:
        self.resources.append(Resource(name, capacity))
        return self.resources[-1]

    def lane(self, name: str) -> Lane:
        self.lanes.append(Lane(name))
        return self.lanes[-1]

    def hold(self, pool: str, nbytes: float) -> None:
        """Add `nbytes` to the bytes that `pool` holds; a negative number removes bytes."""
        at = self.pools.setdefault(pool, Pool(pool))
        at.held += nbytes
        at.peak = max(at.peak, at.held)
        if at.changes[-1][0] == self.now:
            at.changes[-1] = self.now, at.held
        else:
            at.changes.append((self.now, at.held))

    # tasks

    def task(
        self,
        stage: str,
        cost: Cost,
        *,
        lane: Lane | None = None,
        after: Iterable[Task] = (),
        then: Then | None = None,
        priority: float = 0.0,
        where: str = "",
    ) -> Task:
        """Create a task. The task begins when all tasks in `after` have ended and `lane` is free.
        `stage`: the kind of work, such as "Push". `then`: called when the task ends; it may create
        further tasks. `where`: the pipeline stage or server that does the work."""
        self.created += 1
        used = [use for use in cost.uses if use[1] > 0]
        limits = [use for use in used if use[0].capacity < float("inf")]
        work = max(cost.work, 0.0)
        task = Task(stage, work, limits, self.created, lane, then, priority, where, cost.latency)
        task.left = work
        unlimited = cost.max_rate == float("inf")
        task.max_rate = 1.0 if unlimited and not used else cost.max_rate
        for other in after:
            if not other.ended:
                other.waited_by.append(task)
                task.after += 1
        self._open[task] = None
        if not task.after:
            self._ready(task)
        return task

    def _ready(self, task: Task) -> None:
        lane = task.lane
        if lane is None:
            self._begin(task)
        elif lane.running is None:
            lane.running = task
            self._begin(task)
        else:
            heapq.heappush(lane.waiting, (task.priority, task.number, task))

    def _begin(self, task: Task) -> None:
        task.begin = self.now
        if task.latency > 0 and task.work > 0 and task.uses:
            task.rate = -1.0  # means: the latency is not over, so the task uses no resource yet
            heapq.heappush(self._events, (self.now + task.latency, task.number, task.stamp, task))
        elif task.uses and task.work > 0:
            self._run(task)
        else:
            end = self.now + task.latency + task.work / task.max_rate
            heapq.heappush(self._events, (end, task.number, 0, task))

    def _run(self, task: Task) -> None:
        task.rate, task.since = 0.0, self.now
        for resource, weight in task.uses:
            resource.running[task] = resource.running.get(task, 0.0) + weight
            self._dirty[resource] = None

    def _end(self, task: Task) -> None:
        task.end, task.stamp = self.now, task.stamp + 1
        del self._open[task]
        for resource, weight in task.uses:
            if resource.running.pop(task, None) is not None:
                self._dirty[resource] = None
            resource.used += task.work * weight
        sums = self.stages.setdefault((task.where, task.stage), [0.0, 0.0])
        sums[0] += task.end - task.begin
        sums[1] += task.work
        if self.trace is not None:
            self.trace.append(task)
        if (lane := task.lane) is not None:
            lane.busy += task.end - task.begin
            lane.running = None
            if lane.waiting:
                lane.running = heapq.heappop(lane.waiting)[2]
                self._begin(lane.running)
        for other in task.waited_by:
            other.after -= 1
            if not other.after:
                self._ready(other)
        if task.then is not None:
            task.then()

    # the clock

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Run the simulation until no event is left, or until `until()` returns true. Raises
        LoopError if a task can never begin, or if `until()` never returns true."""
        events = self._events
        while True:
            if self._dirty and not (events and events[0][0] <= self.now):
                self._share()
            if not events:
                break
            second, _, stamp, task = heapq.heappop(events)
            if stamp != task.stamp or task.ended:
                continue
            self.now = max(self.now, second)
            if task.rate < 0:
                self._run(task)
                continue
            self._end(task)
            if until is not None and until():
                return
        if self._open if until is None else not until():
            left = ", ".join(f"{t.stage} of {t.where or 'no stage'}" for t in [*self._open][:3])
            raise LoopError(
                f"the simulated step is deadlocked at {self.now:.3f} s: {len(self._open)} tasks"
                f" wait for events that never happen ({left})"
            )

    def _share(self) -> None:
        """Set the rates of all tasks whose share of a resource has changed."""
        tasks, resources = self._touched()
        if len(tasks) == 1:  # the most frequent case: its rate is simple to compute
            (task,) = tasks
            # `uses` may list a resource twice: for data, and for acknowledgements
            full = (resource.capacity / resource.running[task] for resource, _ in task.uses)
            rates = {task: min(task.max_rate, *full)}
        else:
            rates = fair_rates(tasks, resources)
        for task, rate in rates.items():
            if abs(rate - task.rate) <= TINY * rate:
                continue
            task.left = max(0.0, task.left - task.rate * (self.now - task.since))
            task.rate, task.since, task.stamp = rate, self.now, task.stamp + 1
            if rate > 0:
                end = self.now + task.left / rate
                heapq.heappush(self._events, (end, task.number, task.stamp, task))

    def _touched(self) -> tuple[dict[Task, None], dict[Resource, None]]:
        """Return the tasks whose rates may have to change, and the resources that determine these
        rates."""
        tasks: dict[Task, None] = {}
        resources, front = dict.fromkeys(self._dirty), list(self._dirty)
        self._dirty = {}
        while front:
            for task in front.pop().running:
                if task in tasks:
                    continue
                tasks[task] = None
                for resource, _ in task.uses:
                    if resource not in resources:
                        resources[resource] = None
                        front.append(resource)
        return tasks, resources

    def used(self, resource: Resource) -> float:
        """Return the total amount of a resource that tasks have used so far, such as bytes of a
        link."""
        return resource.used + sum(
            (task.work - task.left + task.rate * (self.now - task.since)) * w
            for task, w in resource.running.items()
        )

    def check(self) -> None:
        for resource in self.resources:
            used = sum(task.rate * weight for task, weight in resource.running.items())
            most = resource.capacity * (1 + 1e-9)
            assert used <= most, (resource.name, used, resource.capacity)
        for lane in self.lanes:
            assert lane.running is None or (lane.running.begin >= 0 and not lane.running.ended)


def fair_rates(tasks: Iterable[Task], resources: Iterable[Resource]) -> dict[Task, float]:
    """Return the rate of each task, by weighted max-min fairness: all rates grow equally until a
    task reaches its `max_rate` or a resource is full.

    Small weights must not be lost to rounding. Therefore resources that become full at nearly the
    same rate count as full together, and the weights of growing tasks are summed anew in each
    round.
    """
    rates: dict[Task, float] = {}
    # for each resource, the capacity that tasks with a final rate do not use
    left = {resource: resource.capacity for resource in resources}
    growing = dict.fromkeys(sorted(tasks, key=lambda task: task.number))
    # for each resource, the growing tasks that use it, each with its weight
    users: dict[Resource, dict[Task, float]] = {}
    for task in growing:
        for resource, weight in task.uses:
            own = users.setdefault(resource, {})
            own[task] = own.get(task, 0.0) + weight
    levels = {resource: left[resource] / sum(own.values()) for resource, own in users.items()}
    while growing:
        level = min([*levels.values(), min(task.max_rate for task in growing)])
        most = level * (1 + TINY)
        full = {resource for resource, reached in levels.items() if reached <= most}
        final = [t for t in growing if t.max_rate <= most or any(r in full for r, _ in t.uses)]
        assert final, "each round must give at least one task its rate"
        touched: dict[Resource, None] = {}
        for task in final:
            rates[task] = level
            del growing[task]
            for resource, _ in task.uses:
                if task in users[resource]:
                    left[resource] -= level * users[resource].pop(task)
                    touched[resource] = None
        for resource in touched:
            if left[resource] <= TINY * resource.capacity:
                left[resource] = 0.0  # only a rounding error is left
            if users[resource]:
                levels[resource] = left[resource] / sum(users[resource].values())
            else:
                levels.pop(resource, None)
    return rates
