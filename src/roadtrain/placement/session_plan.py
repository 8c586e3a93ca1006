"""The plan of a session (Request and SessionPlan), and the functions that open the session
(`open_files` and `open_session`).

Nothing is changed before `open_files` is called. Does not use the model's modules or values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roadtrain.chunks import ChunkTable
from roadtrain.device.choice import device_bytes_of
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import ConfigError
from roadtrain.kernels.codecs import Compressor
from roadtrain.kernels.rule import Rule
from roadtrain.options.budgets import Budgets, BudgetTerms, derive, host_bytes_of
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.placement.stores import Files, Memory, Servers, Store
from roadtrain.servers.local_servers import LocalServers, open_or_none
from roadtrain.servers.remote_servers import Reach, RemoteServers
from roadtrain.servers.residuals import Replace, Residuals, residual_blocks
from roadtrain.servers.session import JobServers, JobSession
from roadtrain.servers.store_plan import StorePlan
from roadtrain.storage.generation import OpenedStore
from roadtrain.storage.mark import IN_RAM, Mark
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.rates import storage_rates
from roadtrain.units import show_rate

Report = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The checked options of place(). Raises ConfigError if two options contradict each other."""

    store: Store
    compress: TopK | Downcast | None
    delay: Delay | None
    host_budget: str | int | None
    device_budget: str | int | None
    backwards_per_step: int | None  # if None, updates begin at step()
    chunk_elements: int
    compile: bool  # whether the blocks run under torch.compile
    deadline_s: float
    group: WorkerIdentity  # rank and number of the workers that share the servers
    report: Report

    def __post_init__(self) -> None:
        check(self)

    @property
    def top_k(self) -> TopK | None:
        return self.compress if isinstance(self.compress, TopK) else None

    @property
    def error_feedback(self) -> bool:
        return self.top_k is not None and self.top_k.error_feedback

    @property
    def downcast(self) -> str:
        """The dtype to which fp32 gradients are cast for sending. "" if they are not cast."""
        return self.compress.dtype if isinstance(self.compress, Downcast) else ""

    @property
    def staleness(self) -> int:
        """The largest number of updates that may be missing from the parameters of a step."""
        return self.delay.staleness if self.delay else 0

    @property
    def servers(self) -> Servers | None:
        return self.store if isinstance(self.store, Servers) else None

    @property
    def buffering(self) -> str:
        return self.servers.buffering if self.servers else "auto"

    @property
    def in_memory(self) -> bool:
        return isinstance(self.store, Memory)

    @property
    def held(self) -> set[object]:
        """The directories and (server, rank) pairs that no other session of this process may use at
        the same time."""
        servers = self.servers
        files = servers.residual_files if servers else self.store
        paths = (*files.paths, *files.left) if isinstance(files, Files) else ()
        links = [(address, self.group.rank) for address in servers.resolved] if servers else []
        return {*map(os.path.realpath, paths), *links}

    @property
    def lossy(self) -> dict[str, Any]:
        """The options that make training lossy or delay updates, by their names in
        metrics.jsonl."""
        out: dict[str, Any] = {}
        if self.delay is not None:
            out["staleness"] = "none" if self.delay.steps is None else self.delay.steps
        if self.downcast:
            out["downcast"] = self.downcast
        if self.top_k is not None:
            out |= {"keep": self.top_k.keep, "error_feedback": self.error_feedback}
        words = self.servers.route.lossy(self.group) if self.servers else ""
        return out | ({"fan_in": words} if words else {})

    def say_lossy(self) -> None:
        """Report each option that makes training lossy or delays updates."""
        if self.compress is not None:
            self.report(f"lossy: {self.compress}")
        if self.delay is not None:
            self.report(f"late: {self.delay}")
        if self.servers and (words := self.servers.route.lossy(self.group)):
            self.report(f"lossy: {words}")


def check(request: Request) -> None:
    """Raise ConfigError if options contradict each other, although each value is valid."""
    _check_error_feedback(request)
    servers = request.servers
    if servers:
        servers.route.check_workers(request.group, str(request.top_k or ""))
    elif (workers := request.group.workers) > 1:
        raise ConfigError(
            f"{workers} workers were started (WORLD_SIZE), but there are 0 servers that would sum"
            " their gradients, so each worker would train a model of its own",
            hint="start 1 worker; or share servers with store=Servers([...]) and `roadtrain serve`"
            " (`roadtrain launch` starts both); or use parallelize(), in a job [parallelism]; or,"
            " if the model fits on each device, DDP with roadtrain.sum_hook",
        )
    if request.downcast and servers is None:
        raise ConfigError(
            f"Downcast({request.downcast!r}) has no effect without servers: no gradients are sent",
            hint="leave compress out, or use store=Servers([...])",
        )
    if request.staleness > 1 and request.buffering == "none":
        raise ConfigError(
            f"a delay of {request.staleness} updates cannot be combined with buffering 'none':"
            " backward must use the parameters of forward, but a block fetched again may differ",
            hint="leave buffering out",
        )


def _check_error_feedback(request: Request) -> None:
    residuals = request.servers and request.servers.residual_files
    if request.servers and bool(residuals) != request.error_feedback:
        raise ConfigError(
            f"error_feedback is {request.error_feedback}, but the `residuals` of Servers are"
            f" {'set' if residuals else 'not set'}",
            hint="pass Servers(..., residuals=DIRECTORY) with a directory of this host if error"
            " feedback is on, and leave residuals out if it is off",
        )
    if request.error_feedback and (request.backwards_per_step or 1) > 1:
        raise ConfigError(
            "error feedback keeps one residual per step, so backwards_per_step cannot be"
            f" {request.backwards_per_step}",
            hint="set backwards_per_step to 1",
        )
    if request.error_feedback and request.delay:
        raise ConfigError(
            f"error feedback needs all updates, but delay allows {request.staleness} to be missing",
            hint="leave out delay, or set error_feedback=False",
        )


@dataclass(frozen=True)
class SessionPlan:
    """The tables, budgets and layout of one session."""

    request: Request
    device: torch.device
    table: ChunkTable  # the model's blocks
    # assignment of chunks to servers; without remote servers, its table has the residuals as well
    store_plan: StorePlan
    residuals: Residuals | None  # with remote servers, this worker's own residuals
    compressor: Compressor | None
    budgets: Budgets


def plan_session(
    request: Request, device: torch.device, table: ChunkTable, rules: Sequence[Rule]
) -> SessionPlan:
    """Plan the session of `request` without changing anything, and report lossy or late options.
    `rules` has one update rule per parameter group. Raises BudgetError or ConfigError."""
    whole, all_rules = table, rules
    if request.error_feedback:
        whole, all_rules = _with_residuals(table, rules, request.chunk_elements)
    residuals = None
    match request.store:
        case Servers() as servers:
            store_plan = StorePlan(
                table,
                rules,
                (),
                weights=(1.0,) * len(servers.addresses),
                staleness=request.staleness,
                replicas=servers.replicas,
            )
            if files := servers.residual_files:
                home = (files.paths[0] / f"worker-{request.group.rank}",)
                residuals = Residuals(
                    StorePlan(whole, all_rules, home, files.direct),
                    len(table.chunks),
                    len(servers.addresses),
                )
        case Files() as files:
            store_plan = StorePlan(
                whole,
                all_rules,
                files.paths,
                files.direct,
                staleness=request.staleness,
                moved_from=files.left,
            )
        case Memory():
            store_plan = StorePlan(whole, all_rules, (), staleness=request.staleness)
    budgets = _budgets(request, device, table, whole, store_plan, residuals)
    compressor = Compressor(request.top_k) if request.top_k else None
    request.say_lossy()
    return SessionPlan(request, device, table, store_plan, residuals, compressor, budgets)


def _with_residuals(
    table: ChunkTable, rules: Sequence[Rule], chunk_elements: int
) -> tuple[ChunkTable, list[Rule]]:
    """Append blocks for the residuals of error feedback. Returns the chunk table of all blocks, and
    all update rules."""
    own = residual_blocks(table, len(rules))
    whole = ChunkTable.build([*StoreMeta.of(table, ()).blocks, *own], chunk_elements)
    return whole, [*rules, *[Replace()] * max(len(b.runs) for b in table.blocks)]


def _budgets(
    request: Request,
    device: torch.device,
    table: ChunkTable,
    whole: ChunkTable,
    store_plan: StorePlan,
    residuals: Residuals | None,
) -> Budgets:
    served = request.servers is not None
    added = range(len(table.blocks), len(whole.blocks))
    of_root = f"residual:{table.blocks[0].name}"
    records = store_plan.records if not served else residuals.records if residuals else {}
    keep = request.top_k.keep if request.top_k else 0.0
    terms = BudgetTerms(
        on_files=not request.in_memory,
        holds_gradients=request.backwards_per_step is None,
        serves=not served,
        residual_blocks=frozenset(added),
        root_residual=next((i for i in added if whole.blocks[i].name == of_root), 0),
        # With a staleness above 1, parameters may change between forward and backward.
        buffering="all" if request.staleness > 1 else request.buffering,
        compressed_bytes=int(keep * 8 * sum(c.numel for c in table.trainable))
        * (request.backwards_per_step or 1),
    )
    owners = () if served else store_plan.owners
    host_bytes = host_bytes_of(request.host_budget, whole=request.in_memory)
    device_bytes = device_bytes_of(request.device_budget, device, request.report)
    return derive(whole, records, owners, terms, host_bytes, device_bytes)


def open_files(plan: SessionPlan, mark: Mark | None) -> tuple[SessionPlan, OpenedStore | None]:
    """Open the store that is in the plan's directories. If there is none, return None and a plan
    whose new store is distributed by `Files.rates`. Raises StoreError or ConfigError."""
    request = plan.request
    if mark is not None and request.in_memory:
        mark.check("", -1, IN_RAM)
    where = ", ".join(map(str, plan.store_plan.directories))

    def accept(job: str, step: int, session: str) -> None:
        if mark is not None:
            mark.check(job, step, where, session=session)

    opened = open_or_none(
        plan.store_plan,
        request.report,
        accept,
    )
    if opened is None and isinstance(request.store, Files) and request.store.rates is not None:
        weights = _rates(request.store, request.report)
        plan = replace(plan, store_plan=replace(plan.store_plan, weights=weights))
    return plan, opened


def _rates(files: Files, report: Report) -> tuple[float, ...]:
    if files.rates != "measured":
        return tuple(map(float, files.rates or ()))
    rates = tuple(storage_rates(d).mixed for d in files.paths)
    report("measured: " + ", ".join(f"{d} {show_rate(r)}" for d, r in zip(files.paths, rates)))
    return rates


def open_session(plan: SessionPlan, opened: OpenedStore | None, mark: Mark | None) -> JobSession:
    request = plan.request
    session = JobSession(
        _servers(plan, opened, mark),
        plan.budgets,
        plan.device,
        compute_blocks=range(1, len(plan.table.blocks)),
        compressor=plan.compressor,
        deadline_s=request.deadline_s,
        residuals=plan.residuals,
        report=request.report,
    )
    session.worker.keep_always = request.backwards_per_step == 1
    session.worker.grad_dtype = request.downcast
    return session


def _servers(plan: SessionPlan, opened: OpenedStore | None, mark: Mark | None) -> JobServers:
    request = plan.request
    if (servers := request.servers) is None:
        return LocalServers(
            plan.store_plan,
            plan.budgets.records,
            opened,
            deadline_s=request.deadline_s,
            report=request.report,
        )
    addresses = servers.resolved
    reach = Reach(
        addresses,
        servers.options(request.deadline_s),
        request.group,
        route=servers.route,
        mark=mark if request.group.rank == 0 else None,
        give_up=[addresses.index(address) for address in servers.given_up],
    )
    return RemoteServers(
        plan.store_plan,
        reach,
        deadline_s=request.deadline_s,
        holds_gradients=request.backwards_per_step is None,
        report=request.report,
    )
