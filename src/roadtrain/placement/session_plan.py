"""SessionPlan: a request put into numbers (tables, budgets, what rests where), and the session
that is opened by it.

Nothing is changed before `open_files`. Does NOT know modules; values come in later
(placement/first_values.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from roadtrain.chunks import ChunkTable
from roadtrain.errors import ConfigError
from roadtrain.kernels.codecs import Compressor
from roadtrain.options.budgets import Budgets, BudgetTerms, derive
from roadtrain.placement.request import Report, Request
from roadtrain.placement.stores import Files, Memory, Servers
from roadtrain.servers.local_servers import LocalServers, open_or_none
from roadtrain.servers.remote_servers import Reach, RemoteServers
from roadtrain.servers.residuals import Replace, Residuals, residual_blocks
from roadtrain.servers.session import JobServers, JobSession
from roadtrain.servers.store_plan import StorePlan
from roadtrain.servers.worker import Worker
from roadtrain.storage.generation import OpenedStore
from roadtrain.storage.mark import IN_RAM, Mark
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.rates import storage_rates
from roadtrain.units import parse_bytes, show_bytes, show_rate


@dataclass(frozen=True)
class SessionPlan:
    """What the session of a request is made of."""

    request: Request
    device: torch.device
    table: ChunkTable  # the model's blocks
    store_plan: StorePlan  # what rests where; without servers also what was not sent (residuals)
    residuals: Residuals | None  # with servers: what this worker keeps of its own
    compressor: Compressor | None
    host_bytes: int  # that the budgets were made of
    budgets: Budgets

    @property
    def compute_blocks(self) -> range:
        return range(1, len(self.table.blocks))

    @property
    def where(self) -> str:
        """The directories of the store, for people."""
        return ", ".join(map(str, self.store_plan.directories))


def plan_session(
    request: Request, device: torch.device, table: ChunkTable, rules: Sequence[Any]
) -> SessionPlan:
    """`rules`: one for each parameter group. Raises BudgetError, ConfigError; changes nothing."""
    whole, all_rules = table, rules
    if request.error_feedback:
        whole, all_rules = _with_residuals(table, rules, request.chunk_elements)
    served = request.servers is not None
    store_plan = _store_plan(
        request, table if served else whole, list(rules if served else all_rules)
    )
    residuals = None
    if request.servers and (files := request.servers.residual_files):
        home = (files.paths[0] / f"worker-{request.group.rank}",)
        residuals = Residuals(
            StorePlan(whole, list(all_rules), home, files.direct),
            len(table.chunks),
            len(request.servers.addresses),
        )
    host_bytes = _host_bytes(request)
    budgets = _budgets(request, device, table, whole, store_plan, residuals, host_bytes)
    compressor = Compressor(request.top_k) if request.top_k else None
    return SessionPlan(
        request, device, table, store_plan, residuals, compressor, host_bytes, budgets
    )


def _with_residuals(
    table: ChunkTable, rules: Sequence[Any], chunk_elements: int
) -> tuple[ChunkTable, list[Any]]:
    """The model's blocks and behind them those of their residuals, and the rules of both."""
    own = residual_blocks(table, len(rules))
    whole = ChunkTable.build([*StoreMeta.of(table, ()).blocks, *own], chunk_elements)
    return whole, [*rules, *[Replace()] * max(len(b.runs) for b in table.blocks)]


def _store_plan(request: Request, table: ChunkTable, rules: list[Any]) -> StorePlan:
    match request.store:
        case Files() as files:
            return StorePlan(
                table,
                rules,
                files.paths,
                files.direct,
                staleness=request.staleness,
                moved_from=files.left,
            )
        case Servers() as servers:
            return StorePlan(
                table,
                rules,
                (),
                weights=(1.0,) * len(servers.addresses),
                staleness=request.staleness,
                replicas=servers.replicas,
            )
        case Memory():
            return StorePlan(table, rules, (), staleness=request.staleness)


def _host_bytes(request: Request) -> int:
    if request.host_budget is not None:
        return parse_bytes(request.host_budget)
    free = psutil.virtual_memory().available
    return int(free if request.in_memory else free // 2)


def _device_bytes(request: Request, device: torch.device) -> int | None:
    if request.device_budget is None:
        return None
    nbytes = parse_bytes(request.device_budget)
    if device.type == "cpu":
        raise ConfigError(
            f"device_budget = {show_bytes(nbytes)}, and blocks run on the CPU, whose memory is the"
            " host's",
            hint=f"host_budget={request.device_budget!r}",
        )
    return nbytes


def _budgets(
    request: Request,
    device: torch.device,
    table: ChunkTable,
    whole: ChunkTable,
    store_plan: StorePlan,
    residuals: Residuals | None,
    host_bytes: int,
) -> Budgets:
    served = request.servers is not None
    added = range(len(table.blocks), len(whole.blocks))
    of_root = f"residual:{table.blocks[0].name}"
    records = store_plan.meta().records if not served else residuals.records if residuals else {}
    keep = request.top_k.keep if request.top_k else 0.0
    terms = BudgetTerms(
        on_files=not request.in_memory,
        holds_gradients=request.waits_for_step,
        serves=not served,
        residual_blocks=frozenset(added),
        root_residual=next((i for i in added if whole.blocks[i].name == of_root), 0),
        # parameters change at any time: backward needs forward's
        buffering="all" if request.staleness > 1 else request.buffering,
        compressed_bytes=int(keep * 8 * sum(c.numel for c in table.trainable))
        * (request.backwards_per_step or 1),
    )
    owners = () if served else store_plan.owners
    return derive(whole, records, owners, terms, host_bytes, _device_bytes(request, device))


def open_files(plan: SessionPlan, mark: Mark | None) -> tuple[SessionPlan, OpenedStore | None]:
    """The store that is in the directories, if there is one; where there is none, the plan spreads
    the new one by the rates that were asked for. Raises StoreError, ConfigError."""
    request = plan.request
    if mark is not None and request.in_memory:
        mark.check("", -1, IN_RAM)
    opened = open_or_none(
        plan.store_plan,
        request.report,
        lambda job, step, session: _check_mark(mark, job, step, plan.where, session),
    )
    if opened is None and isinstance(request.store, Files) and request.store.rates is not None:
        weights = _rates(request.store, request.report)
        plan = replace(plan, store_plan=replace(plan.store_plan, weights=weights))
    return plan, opened


def _check_mark(mark: Mark | None, job: str, step: int, where: str, session: str) -> None:
    if mark is not None:
        mark.check(job, step, where, session=session)


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
        compute_blocks=plan.compute_blocks,
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
        give_up=[addresses.index(one) for one in servers.given_up],
    )
    return RemoteServers(
        plan.store_plan,
        reach,
        deadline_s=request.deadline_s,
        holds_gradients=request.waits_for_step,
        report=request.report,
    )


def keep_blocks(worker: Worker, spare: int) -> str:
    """Where a block comes sooner over the network than from host memory to the device, the
    `spare` slots that would keep blocks from forward to backward are given up. Returns what is
    done and why, for people."""
    pulled, copied = worker.pull_rate, worker.root.copy_rate()
    if spare and pulled > copied:
        worker.give_up_slots(spare)
    rates = f"pulled at {show_rate(pulled)}" + (
        "" if math.isinf(copied) else f", to the device at {show_rate(copied)}"
    )
    staying = min(len(worker.order), len(worker.prefetch.slots))
    return (
        f"buffering: {staying} of {len(worker.order)} blocks stay from forward to backward"
        f" ({rates})"
    )


def describe(plan: SessionPlan, session: JobSession, step: int) -> str:
    """The last line that place() prints."""
    store, group = plan.request.store, plan.request.group
    where = "RAM: it is lost when this process ends"
    if isinstance(store, Files):
        where = f"files in {plan.where}"
    if isinstance(store, Servers):
        where = (
            f"{len(store.addresses)} server(s) {session.servers.rests}, replicas ="
            f" {store.replicas}, worker {group.rank} of {group.workers}"
        )
    line = (
        f"placed {len(plan.table.blocks) - 1} blocks and the root block; state on {where}; step"
        f" {step}"
    )
    if plan.request.host_budget is None:  # whatever is free bounds it
        return line
    return f"{line}; at most {show_bytes(plan.budgets.total)} of {show_bytes(plan.host_bytes)}"
