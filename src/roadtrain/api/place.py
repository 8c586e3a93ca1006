"""place(): the user's one line. Their model keeps its modules, their optimizer its class and
groups; parameters and optimizer state move to servers, blocks are fetched as they run.

With `servers` the state rests in other processes, and several workers train on the mean of their
gradients.
Assumes: what RANK and WORLD_SIZE say, where there are several workers. Does NOT start processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from roadtrain.api.first_values import start
from roadtrain.api.optimizer import PlacedOptimizer
from roadtrain.chunks import MAX_CHUNK, ChunkTable
from roadtrain.config.budgets import derive, derive_relay
from roadtrain.device.copies import beside_accelerator, own_device
from roadtrain.errors import ConfigError, ModelError
from roadtrain.kernels.generic import say_generic
from roadtrain.kernels.rules import rules_for
from roadtrain.runtime.compress import Compressor, Replace, residual_blocks
from roadtrain.runtime.local_session import LocalSession, StorePlan, open_or_none
from roadtrain.runtime.residuals import Residuals
from roadtrain.runtime.session import RemoteSession, WorkerGroup
from roadtrain.runtime.worker import Worker
from roadtrain.storage.ledger import StoreMeta
from roadtrain.storage.mark import IN_RAM, Mark
from roadtrain.storage.rates import storage_rates
from roadtrain.streaming.fetched import has_released_value
from roadtrain.streaming.split import NAMES, split, table
from roadtrain.transport.address import address_of
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import parse_bytes, show_bytes, show_rate

Report = Callable[[str], None]
NO_BOUND = 16  # steps whose gradients a server must then be able to put away (Rule 4)


def place(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    store: str | Path | Sequence[str | Path] | None = None,
    servers: Sequence[str] | None = None,
    replicas: Literal[1, 2] = 1,
    give_up: Sequence[str] = (),
    link: TcpOptions | None = None,
    relay: str | int | None = None,
    buffering: Literal["auto", "all", "none"] = "auto",
    budget: str | int | None = None,
    dtype: torch.dtype | None = None,
    blocks: Sequence[str] | None = None,
    backwards_per_step: int | None = None,
    staleness: int | Literal["none"] = 0,
    topk: float | None = None,
    topk_per_block: bool = False,
    error_feedback: bool = False,
    grad_dtype: torch.dtype | None = None,
    chunk_elements: int = MAX_CHUNK,
    store_rates: Sequence[float] | Literal["measured"] | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    init: Callable[[nn.Module], None] | None = None,
    extra: Mapping[str, Any] | None = None,
    mark: Mark | None = None,
    moved_from: Sequence[str | Path] = (),
    direct: bool = True,
    deadline_s: float = 600.0,
    report: Report = print,
) -> PlacedOptimizer:
    """Move `model`'s parameters and `optimizer`'s state to servers; returns the optimizer to use
    from now on.

    store: a directory per server (None: all in RAM); a store found there is resumed. With servers
    and error feedback: one directory of this host, where what its workers have not sent rests.
    servers: instead of `store`, the HOST:PORT of every `roadtrain serve` that takes a part, always
    in the same order; all workers of a torchrun share them, and each update takes the mean of their
    gradients. replicas: 2 gives every chunk a second server that applies the same pushes; a server
    that does not answer at the start is left out where it cannot hold later steps (with two servers
    the run directory's `mark` knows that, or worker 0 of the last session, if it saw the other die
    or ended well; with more a majority is needed), one that comes back is filled up again. give_up:
    addresses among `servers` whose contents are not to count at this start where that is in doubt:
    one that is away is left out all the same; of one that answers, the store is moved aside and
    filled up from the others. link: how they are reached (token, TLS, connections). relay: host
    bytes for a process beside the workers of this host that communicates for them. buffering: which
    blocks are kept from forward to backward, which then pulls nothing: as many as fit where that is
    faster than the network (auto), all, or none. budget: host bytes for everything that roadtrain
    keeps in memory ("900MiB"; None: half of what is free). dtype: what parameters travel and
    compute in (None: their own); masters and state are fp32. blocks: names or patterns of the
    blocks (None: found). backwards_per_step: None, updates begin at step(); N promises that step()
    follows every N-th backward pass, without clipping or loss scaling, and a block is updated as
    soon as its last gradient is in. staleness: 1, each step computes with the parameters from
    before the last step's update, which runs meanwhile (delayed update); K > 1, with the newest
    that there are, at most the last K updates missing, so that a slow worker does not hold up the
    others at once (runs differ then); "none", no bound but that of what servers put away, 16 steps.
    topk: fraction of the gradient's volume that is communicated, indices included (0.02 keeps 1 %).
    grad_dtype: what whole gradients of fp32 parameters travel to servers in, bfloat16 or float16
    (None: fp32); they are summed in fp32, and those of 16-bit parameters go as they are.
    store_rates: relative rates of the directories, by which a new store's chunks are spread (None:
    evenly; "measured": measured now). weights: a directory of safetensors in Hugging Face layout
    that the first values come from. init: initialises a module of a model built on `meta`. extra:
    objects with state_dict/load_state_dict that are committed and resumed with each step. device:
    where blocks run ("cuda": each worker's own, by LOCAL_RANK; None: where the model is). mark:
    what a run directory knows of its store (storage/mark.py): another store than it names, an older
    one, or none, is refused before anything is changed. moved_from: directories that the store has
    rested in and shall leave: only directories that are named here or in `store` are read, written
    or removed.

    Raises UserError (ConfigError, ModelError, RuleError, BudgetError) before anything is changed,
    StoreError (also ForkedError, where servers went on without each other, and StaleError, where
    later steps are known of).
    """
    _check_fresh(optimizer)
    group = WorkerGroup.of_environment() if servers else WorkerGroup()
    paths = [store] if isinstance(store, str | Path) else list(store or ())
    if servers and (len(paths) != error_feedback or store_rates is not None):
        raise ConfigError(
            f"{len(servers)} server(s), {len(paths)} store directories, error feedback"
            f" {error_feedback}",
            hint=(
                "the state rests here (store) or there (servers); with servers and error feedback"
                " what was not sent rests in one directory of this host (store)"
            ),
        )
    if moved_from and (servers or not paths):
        raise ConfigError(
            f"moved_from = {list(moved_from)} without a store to move to",
            hint="name its directories",
        )
    if buffering not in ("auto", "all", "none") or (buffering != "auto" and not servers):
        raise ConfigError(
            f"buffering = {buffering!r} with {len(servers or ())} server(s)",
            hint="auto, all or none; blocks are kept from a network's servers only",
        )
    if replicas not in (1, 2) or replicas > max(1, len(servers or ())):
        raise ConfigError(
            f"replicas = {replicas} with {len(servers or ())} server(s)", hint="2 needs 2 or more"
        )
    if not servers and (others := WorkerGroup.of_environment().workers - 1):
        report(
            f"WORLD_SIZE says {others} more worker(s): without servers each trains by itself,"
            " nothing is averaged"
        )
    if relay is not None and not servers:
        raise ConfigError("a relay goes between workers and servers, and no servers are given")
    if relay is not None and replicas > 1:
        raise ConfigError(
            f"a relay does not find out which of {replicas} replicas is missing",
            hint="leave relay out, or replicas",
        )
    if relay is not None and link is not None and type(link) is not TcpOptions:
        raise ConfigError(
            "a relay reaches the servers over TCP, and link= is"
            f" {type(link).__module__}.{type(link).__name__}",
            hint="leave relay out, or give roadtrain.transport.tcp.TcpOptions",
        )
    if relay is not None and topk is not None and group.local > 1:
        raise ConfigError(
            f"a relay adds up whole gradients of its {group.local} workers, not top-k ones",
            hint="leave relay out, or topk",
        )
    narrow = "" if grad_dtype is None else NAMES.get(grad_dtype, "unknown")
    if narrow not in ("", "bf16", "fp16") or (narrow and (not servers or topk is not None)):
        raise ConfigError(
            f"grad_dtype = {grad_dtype} with {len(servers or ())} server(s) and topk = {topk}",
            hint="torch.bfloat16 or torch.float16, to servers of a network and without topk",
        )
    addresses = [address_of(text) for text in servers or ()]
    unknown = sorted(set(map(address_of, give_up)) - set(addresses))
    if unknown or (give_up and (replicas == 1 or len(set(give_up)) == len(addresses))):
        raise ConfigError(
            f"give_up = {list(give_up)} of servers {list(servers or ())} with replicas ="
            f" {replicas}",
            hint="addresses as in servers, not all of them, with replicas = 2",
        )
    if device is None and (line := beside_accelerator(found := _device_of(model))):
        report(line)
    device = own_device(found if device is None else device, report)
    parts = split(model, blocks)
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    _check_known(model, groups)
    if outside := [n for n, p in model.named_parameters() if p.requires_grad and p not in groups]:
        report(
            f"{len(outside)} parameters are in no parameter group ({outside[0]!r} is the first):"
            " they stay as they are and get no gradient, so that clipping does not count theirs"
        )
    rules: list[Any] = list(rules_for(optimizer))
    say_generic(rules, report)
    base = table(parts, groups, dtype, chunk_elements)
    whole, residual_of_root, residual_set = base, 0, frozenset[int]()
    if error_feedback and topk is None:
        raise ConfigError(
            "error_feedback without topk", hint="give topk=0.02, or drop error_feedback"
        )
    if error_feedback and (backwards_per_step or 1) > 1:
        raise ConfigError(
            "error feedback keeps one residual a step", hint="backwards_per_step must be 1"
        )
    if error_feedback:
        mine = residual_blocks(base, len(rules))
        rules += [Replace()] * max(len(b.runs) for b in base.blocks)
        whole = ChunkTable.build([*StoreMeta.of(base, ()).blocks, *mine], chunk_elements)
        residual_set = frozenset(range(len(base.blocks), len(whole.blocks)))
        residual_of_root = next(
            (i for i in residual_set if whole.blocks[i].name == f"residual:{base.blocks[0].name}"),
            0,
        )
    bound = NO_BOUND if staleness == "none" else staleness
    if not isinstance(bound, int) or bound < 0 or (bound and error_feedback):
        raise ConfigError(
            f"staleness {staleness!r}, error feedback {error_feedback}",
            hint="0, 1, more or 'none'; above 0 without error feedback",
        )
    if bound > 1 and buffering == "none":
        raise ConfigError(
            f"staleness {staleness} and buffering {buffering!r}: parameters change at any time,"
            " backward needs those that forward had",
            hint="leave buffering out",
        )
    store_plan = StorePlan(
        whole,
        rules,
        tuple(Path(p) for p in paths),
        direct,
        (1.0,) * len(addresses),
        bound,
        replicas,
        tuple(Path(p) for p in moved_from),
    )
    residuals = None
    if addresses and error_feedback:
        here = (Path(paths[0]) / f"worker-{group.rank}",)
        residuals = Residuals(
            StorePlan(whole, rules, here, direct), len(base.chunks), len(addresses)
        )
    if addresses:
        store_plan = replace(
            store_plan, table=base, rules=rules[: len(optimizer.param_groups)], directories=()
        )
    free = psutil.virtual_memory().available
    host = parse_bytes(budget) if budget is not None else free // 2 if paths or addresses else free
    budgets = derive(
        whole,
        residuals.records if residuals else {} if addresses else store_plan.meta().records,
        () if addresses else store_plan.owners,
        host,
        on_files=bool(paths or addresses),
        holds_gradients=backwards_per_step is None,
        serves=not addresses,
        residual_blocks=residual_set,
        root_residual=residual_of_root,
        # parameters change at any time: backward needs forward's
        buffering="all" if bound > 1 else buffering,
        compressed_bytes=int((topk or 0) / 2 * 8 * sum(c.numel for c in base.trainable))
        * (backwards_per_step or 1),
    )
    compressor = None
    if topk is not None:
        compressor = Compressor(
            whole, topk / 2, per_block=topk_per_block, error_feedback=error_feedback
        )
        report(
            f"lossy: top-k, {topk:.1%} of the gradient is communicated, error feedback"
            f" {error_feedback}"
        )
    if narrow:
        report(f"lossy: gradients travel as {narrow}")
    if bound:
        lacking = "the last update" if bound == 1 else f"up to {bound} updates"
        report(
            f"late: staleness {staleness}, each step computes with parameters that lack {lacking}"
        )
    if mark is not None and not paths and not addresses:
        mark.check("", -1, IN_RAM)
    where = ", ".join(map(str, store_plan.directories))
    opened = open_or_none(
        store_plan,
        report,
        lambda job, step: mark.check(job, step, where) if mark is not None else None,
    )
    said = opened.notes if opened is not None else ()
    if opened is None and store_rates is not None:
        store_plan = replace(
            store_plan, weights=_rates(store_plan.directories, store_rates, report)
        )
    if (
        opened is None
        and weights is None
        and (gone := [n for n, p in model.named_parameters() if has_released_value(p)])
    ):
        raise ConfigError(
            f"{len(gone)} of the model's parameters hold no values ({gone[0]!r}): it is placed,"
            " or was",
            hint=(
                "build the model anew, or name the store that holds its values, or give"
                " weights=DIRECTORY"
            ),
        )
    engine: LocalSession | RemoteSession
    if addresses:
        engine = RemoteSession(
            store_plan,
            budgets,
            addresses,
            _patient(link or TcpOptions(), deadline_s),
            group,
            device,
            compute_blocks=range(1, len(base.blocks)),
            compressor=compressor,
            deadline_s=deadline_s,
            holds_gradients=backwards_per_step is None,
            residuals=residuals,
            report=report,
            mark=mark if group.rank == 0 else None,
            give_up=[addresses.index(address_of(a)) for a in give_up],
            relay=(
                None
                if relay is None
                else derive_relay(
                    base,
                    parse_bytes(relay),
                    servers=len(addresses),
                    local=group.local,
                    holds_gradients=backwards_per_step is None,
                )
            ),
        )
    else:
        engine = LocalSession(
            store_plan,
            budgets,
            opened,
            device,
            compute_blocks=range(1, len(base.blocks)),
            compressor=compressor,
            deadline_s=deadline_s,
            report=report,
        )
    engine.worker.keep_always = backwards_per_step == 1
    engine.worker.grad_dtype = narrow
    placed = PlacedOptimizer(
        model, optimizer, parts, base, engine, backwards_per_step, dict(extra or {}), report
    )
    try:
        start(placed, model, parts, base, engine, device, weights, init, budgets.activation_bytes)
        if mark is not None and group.rank == 0:
            mark.adopt(
                engine.meta.job if paths or addresses else "", placed.steps_done, engine.history
            )
    except BaseException:
        engine.close()
        raise
    if addresses:
        report(_keep_blocks(engine.worker, 0 if buffering != "auto" else budgets.kept))
    for note in engine.store.notes if engine.store else ():
        if note not in said:  # when it was opened
            report(note)
    where = (
        f"files in {', '.join(map(str, paths))}"
        if paths
        else "RAM: it is lost when this process ends"
    )
    if isinstance(engine, RemoteSession):
        where = (
            f"{len(addresses)} server(s) {engine.rests}, replicas = {replicas}, "
            f"worker {group.rank} of {group.workers}"
        )
    report(
        f"placed {len(base.blocks) - 1} blocks and the root block; state on {where}; step"
        f" {placed.steps_done}; at most {show_bytes(budgets.total)} of {show_bytes(host)}"
    )
    return placed


def _patient(link: TcpOptions, deadline_s: float) -> TcpOptions:
    """As long as the user's deadline where the options do not say how long: servers may still be
    starting, or hold the session of workers that are leaving."""
    return link if link.retry_s is not None else replace(link, retry_s=deadline_s)


def _device_of(model: nn.Module) -> torch.device:
    found = {p.device for p in model.parameters()} - {torch.device("meta")}
    if len(found) > 1:
        raise ModelError(
            f"the model's parameters are on {sorted(map(str, found))}", hint="put it on one device"
        )
    return next(iter(found), torch.device("cpu"))


def _keep_blocks(worker: Worker, spare: int) -> str:
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


def _rates(
    directories: Sequence[Path], asked: Sequence[float] | Literal["measured"], report: Report
) -> tuple[float, ...]:
    given = () if isinstance(asked, str) else tuple(map(float, asked))
    rates = tuple(storage_rates(d).mixed for d in directories) if asked == "measured" else given
    if (
        not directories
        or len(rates) != len(directories)
        or not all(0 < rate < float("inf") for rate in rates)
    ):
        raise ConfigError(
            f"store_rates {asked!r} for {len(directories)} directories",
            hint="'measured', or a number above 0 for each",
        )
    if asked == "measured":
        report("measured: " + ", ".join(f"{d} {show_rate(r)}" for d, r in zip(directories, rates)))
    return rates


def _check_fresh(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, PlacedOptimizer):
        raise ConfigError(
            "this optimizer is placed already",
            hint="give place() the optimizer that it was made from",
        )
    if any(state and float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"this {type(optimizer).__name__} has taken steps: its state would be lost",
            hint="place it before the first step; optimizer.state.clear() begins anew",
        )


def _check_known(model: nn.Module, groups: Mapping[nn.Parameter, int]) -> None:
    mine = set(model.parameters())
    strangers = [p for p in groups if p not in mine]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of the optimizer's {len(groups)} parameters are not in the model "
            f"(the first has shape {tuple(strangers[0].shape)})",
            hint="make the optimizer from the parameters of the model that is placed",
        )
