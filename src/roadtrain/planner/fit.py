"""`roadtrain fit MODEL`: say whether a model can be trained on a machine, with how much memory, how
fast, and with which command. Reads configurations only: no weights, and usually no torch.

    model_of, machine_of    what is asked about (fit_inputs.py)
    evaluate                one row: a kind of training with its state in one place
    least_change            what would make a row fit
    speed                   tokens/s, from a cluster file with measured rates
    command_of              the command that runs the best row
"""

from __future__ import annotations

import importlib
import json as to_json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.names import unknown_name
from roadtrain.planner.fit_inputs import FitModel, Machine, machine_of, model_of
from roadtrain.planner.process_memory import (
    PlacedLayout,
    ProcessMemory,
    Work,
    kept_inputs,
    least_device_budget,
    process_memory,
)
from roadtrain.units import MIB, show_bytes, show_number, show_params

STATES = ("RAM", "SSDs", "server")
DTYPES = ("fp32", "bf16", "fp16")
SCHEMA = 1
RANK = 16  # of LoRA adapters
RESERVE = 0.95  # fraction of a device's free memory that fit plans with
WHOLE = 1 << 50  # bytes; a budget that is always enough
SPEED_ERROR = 1.1  # the simulator's predictions are within 10 % (docs/benchmarks.md)


@dataclass(frozen=True)
class Ask:
    """A training, without the place of its state. `rank`: 0 trains all parameters."""

    model: FitModel
    samples: int
    dtype: str
    optimizer: str
    rank: int = 0

    @property
    def by_train(self) -> bool:
        """Whether `roadtrain train` can run it; otherwise place() in a script can."""
        return bool(self.model.pretrained) and not self.rank

    @property
    def work(self) -> Work:
        own = self.model
        loads = own.transformers or bool(self.rank)
        tokens = own.shape.tokens
        return Work(self.samples, tokens, not self.by_train, loads, own.saved, own.logits)


@dataclass(frozen=True)
class FitRow:
    """A line of the table. Sizes are in bytes.

    Attributes:
        ask: What is trained.
        state: Where the state is: an item of STATES.
        memory: Memory of the process with the recommended budgets.
        least: Memory of the host with the smallest budgets.
        disk: Disk space, on the server if the state is there.
        host_budget: Recommended `host_budget`.
        device_budget: Recommended `device_budget`; None if the CPUs compute.
        lacking: (memory, bytes that it lacks); empty if the row fits.
        change: What would make the row fit; "" if it fits.
        tokens_per_s: Lower and upper limit; None if nothing was measured.
    """

    ask: Ask
    state: str
    memory: ProcessMemory
    least: float
    disk: float
    host_budget: int
    device_budget: int | None
    lacking: tuple[tuple[str, float], ...] = ()
    change: str = ""
    tokens_per_s: tuple[float, float] | None = None

    @property
    def training(self) -> str:
        return f"LoRA, rank {self.ask.rank}" if self.ask.rank else "full"


@dataclass
class Fitting:
    """Rows for one machine. Keeps the layouts of parameters, which take long to compute."""

    machine: Machine
    layouts: dict[Any, PlacedLayout] = field(default_factory=dict)

    def placed(self, ask: Ask) -> PlacedLayout:
        key = id(ask.model.layout), ask.dtype, ask.optimizer, ask.rank
        if key not in self.layouts:
            self.layouts[key] = PlacedLayout(ask.model.layout, *key[1:])
        return self.layouts[key]

    def evaluate(self, ask: Ask, state: str) -> FitRow:
        """Compute the memory of a row with the least and with the recommended budgets."""
        machine, placed, work = self.machine, self.placed(ask), ask.work
        device = self._device_budget(placed, work) if machine.device else None
        kept = kept_inputs(placed, work)

        def with_budget(host: int) -> ProcessMemory:
            found = placed.budgets(work, state, host, device, machine.ssds)
            return process_memory(placed, work, found)

        whole = placed.budgets(work, state, WHOLE, device, machine.ssds)
        on_device = 0 if whole.worker.device is None else whole.worker.device.activation_bytes
        least_budget = placed.least_budget(work, state, max(0.0, kept - on_device), whole)
        least = with_budget(least_budget)
        spare = machine.ram - least.host_bytes
        # the default budget is half of the free memory; in RAM, more than some slots is no use
        preferred = (
            machine.ram / 2 if state != "RAM" else least_budget + 16 * whole.worker.slot_bytes
        )
        budget = max(least_budget, int(min(preferred, least_budget + spare)) // MIB * MIB)
        memory = with_budget(budget)
        disk = placed.file_bytes if state != "RAM" else 0
        needs = [("host memory", least.host_bytes, machine.ram)]
        needs += [("device memory", memory.device_bytes, machine.device_bytes)] if device else []
        if state == "SSDs" and machine.disk is not None:
            needs.append(("disk", disk, machine.disk))
        lacking = tuple((where, need - room) for where, need, room in needs if need > room)
        return FitRow(ask, state, memory, least.host_bytes, disk, budget, device, lacking)

    def _device_budget(self, placed: PlacedLayout, work: Work) -> int:
        """Return the device memory that is left besides temporary tensors, and at least the
        smallest device budget."""
        budgets = placed.budgets(work, "server", WHOLE, WHOLE)
        assert budgets.worker.device is not None
        used = process_memory(placed, work, budgets).device
        # torch's gradients of the root block are counted both in the budget and as temporary
        root = placed.table.blocks[0].push_nbytes
        free = RESERVE * self.machine.device_bytes - used["libraries"]
        free -= used["temporary tensors"] - root
        return max(least_device_budget(budgets.worker.device), int(free) // MIB * MIB)

    def least_change(self, row: FitRow) -> str:
        """Return the smallest change that makes the row fit."""
        if not row.lacking or any(where == "disk" for where, _ in row.lacking):
            return "; ".join(f"{show_bytes(n)} more {where}" for where, n in row.lacking)
        more = " and ".join(f"{show_bytes(n)} more {where}" for where, n in row.lacking)
        smaller = (text for text, ask in _smaller(row.ask) if not self._lacking(ask, row.state))
        other = next(smaller, "")
        return f"{more}, or {other}" if other else more

    def _lacking(self, ask: Ask, state: str) -> bool:
        return bool(self.evaluate(ask, state).lacking)

    def rows(self, asks: Sequence[Ask]) -> list[FitRow]:
        found = [self.evaluate(ask, state) for ask in asks for state in STATES]
        return [replace(row, change=self.least_change(row)) for row in found]


def _smaller(ask: Ask) -> Iterator[tuple[str, Ask]]:
    """Yield smaller trainings, the one that changes least first, each with its options."""
    samples, tokens = ask.samples, ask.model.shape.tokens
    while samples > 1:
        samples //= 2
        yield f"--batch {samples}", replace(ask, samples=samples)
    short = replace(ask, samples=1)
    while tokens > 256 and not ask.model.saved:
        tokens //= 2
        words = f"--seq-len {tokens}" if ask.samples == 1 else f"--batch 1 --seq-len {tokens}"
        yield words, replace(short, model=ask.model.with_tokens(tokens))
    if ask.dtype == "fp32":
        yield "--dtype bf16", replace(ask, dtype="bf16")


def speed(row: FitRow, cluster_file: str) -> tuple[float, float] | None:
    """Predict the lowest and the highest tokens/s of a full fine-tune on a probed machine, whose
    blocks reach half to all of the measured rate of matrix products. Returns None where rates or
    the state's place are missing."""
    clusters = importlib.import_module("roadtrain.config.cluster")
    plans = importlib.import_module("roadtrain.config.plan_file")
    compute = importlib.import_module("roadtrain.simulator.compute")
    run = importlib.import_module("roadtrain.simulator.run")
    cluster = clusters.load_cluster(cluster_file)
    worker = next(iter(cluster.workers), None)
    measured = worker is not None and f"hosts.{worker.name}.device" in cluster.measured
    served, on_files = row.state == "server", row.state == "SSDs"
    if not measured or row.ask.rank or worker is None or (on_files and not worker.ssds):
        return None
    if served and not cluster.spares:
        return None
    size = 4 if row.ask.dtype == "fp32" else 2
    state = OPTIMIZERS[row.ask.optimizer].state_nbytes + (0 if size == 4 else 4)
    plan = plans.make_plan(
        {
            "placement": {"RAM": "zero-offload", "SSDs": "files", "server": "server"}[row.state],
            "micro_batch": row.ask.samples,
            "activation_checkpointing": True,
            "update_at": "step" if row.ask.work.holds else "gradient",
            "sizes": {"parameter_bytes": size, "gradient_bytes": size, "state_bytes": state},
        }
    )
    tokens = row.ask.samples * row.ask.model.shape.tokens
    constants = [compute.Constants(efficiency=e, network=0.9, source="probed") for e in (0.5, 1.0)]
    seconds = [
        run.simulate(plan, cluster, row.ask.model.shape, of, checked=False).seconds
        for of in constants
    ]
    return tokens / max(seconds) / SPEED_ERROR, tokens / min(seconds) * SPEED_ERROR


def best_of(rows: Sequence[FitRow]) -> FitRow | None:
    """Return the row to recommend: the fastest that was measured, or else the first that fits; all
    parameters before LoRA, and this machine before a server."""
    fitting = [row for row in rows if not row.lacking]
    return min(
        fitting,
        key=lambda row: (
            row.state == "server",
            row.ask.rank,
            -row.tokens_per_s[0] if row.tokens_per_s else 0.0,
        ),
        default=None,
    )


def command_of(row: FitRow, machine: Machine) -> str:
    """Return the command, or the line of a script, that runs a row with its budgets."""
    ask, budget = row.ask, f"{row.host_budget // MIB}MiB"
    device = None if row.device_budget is None else f"{row.device_budget // MIB}MiB"
    stores = [f"ssd{i}/run" for i in range(machine.ssds)]
    if not ask.by_train:
        store = {"RAM": "None", "server": 'Servers(["HOST:4000"])'}.get(row.state)
        options = [f"store={store or to_json.dumps(stores)}", f'host_budget="{budget}"']
        options += [f'device_budget="{device}"'] if device else []
        options += [f"dtype=torch.{_TORCH[ask.dtype]}"]
        line = f"optimizer = roadtrain.place(model, optimizer, {', '.join(options)})"
        return f"{line}  # with a LoRA model of PEFT" if ask.rank else line
    model = shlex.quote(ask.model.pretrained)
    options = [
        f"--model.dtype {ask.dtype}",
        f"--data.seq_len {ask.model.shape.tokens} --data.batch_size {ask.samples}",
        f"--optimizer.name {ask.optimizer} --budget.host {budget}",
    ]
    options += [f"--budget.device {device}"] if device else []
    options += ["--store.files '[]'"] if row.state == "RAM" else []
    if row.state == "SSDs" and machine.ssds > 1:
        options.append(f"--store.files {','.join(stores)}")
    options += ["--servers.addresses HOST:4000"] if row.state == "server" else []
    init = f"roadtrain init {model} --out job.toml"
    return f"{init} && roadtrain train job.toml {' '.join(options)}"


_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def text_of(rows: Sequence[FitRow], machine: Machine, params: int) -> str:
    ask = rows[0].ask
    tokens = ask.model.shape.tokens
    of = f" of {tokens} tokens" if tokens > 1 else ""
    head = ("training", "state", "device", "host (at least)", "disk", "tokens/s", "fits")
    measured = any(row.tokens_per_s for row in rows)
    lines = [
        f"{ask.model.name}: {show_params(params)} parameters; batches of {ask.samples}"
        f" sample{'s' * (ask.samples > 1)}{of}, {ask.dtype}, {ask.optimizer}",
        str(machine),
        *machine.notes,
        "",
    ]
    cells = [head, *(_cells(row) for row in rows)]
    if not measured:
        cells = [(*line[:-2], line[-1]) for line in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]) - 1)]
    for line in cells:
        padded = (f"{cell:{width}}" for cell, width in zip(line, widths))
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    if not measured:
        lines.append("tokens/s: not measured (--cluster FILE, written by `roadtrain probe`)")
    best = best_of(rows)
    lines += ["", "nothing fits" if best is None else f"best    {best.training}, {_where(best)}"]
    if best is not None:
        lines.append(f"run     {command_of(best, machine)}")
        parts = ", ".join(f"{name} {show_bytes(n)}" for name, n in best.memory.host.items())
        lines.append(f"host    {parts}")
    return "\n".join(lines)


def _where(row: FitRow) -> str:
    return {"RAM": "state in RAM", "SSDs": "state on SSDs"}.get(row.state, "state on a server")


def _cells(row: FitRow) -> tuple[str, ...]:
    device = show_bytes(row.memory.device_bytes) if row.memory.device else "-"
    fast = row.tokens_per_s
    return (
        row.training,
        "a server" if row.state == "server" else row.state,
        device,
        f"{show_bytes(row.memory.host_bytes)} ({show_bytes(row.least)})",
        show_bytes(row.disk) + " there" * (row.state == "server") if row.disk else "-",
        "not measured" if fast is None else f"{show_number(fast[0])} to {show_number(fast[1])}",
        f"no: {row.change}" if row.lacking else "yes",
    )


def as_json(rows: Sequence[FitRow], machine: Machine, params: int) -> dict[str, Any]:
    ask, best = rows[0].ask, best_of(rows)

    def entry(row: FitRow) -> Mapping[str, Any]:
        return {
            "training": row.training,
            "state": row.state,
            "fits": not row.lacking,
            "lacking": dict(row.lacking),
            "change": row.change,
            "device": dict(row.memory.device),
            "host": dict(row.memory.host),
            "device_bytes": row.memory.device_bytes,
            "host_bytes": row.memory.host_bytes,
            "least_host_bytes": row.least,
            "disk_bytes": row.disk,
            "host_budget": row.host_budget,
            "device_budget": row.device_budget,
            "tokens_per_s": row.tokens_per_s,
            "command": command_of(row, machine),
        }

    return {
        "schema": SCHEMA,
        "model": ask.model.name,
        "params": params,
        "batch": ask.samples,
        "tokens": ask.model.shape.tokens,
        "dtype": ask.dtype,
        "optimizer": ask.optimizer,
        "machine": {"name": machine.name, "ram": machine.ram, "device": machine.device}
        | {"device_bytes": machine.device_bytes, "disk": machine.disk, "ssds": machine.ssds},
        "rows": [entry(row) for row in rows],
        "best": None if best is None else rows.index(best),
    }


def fit(
    model: FitModel,
    machine: Machine,
    *,
    batch: int = 1,
    dtype: str = "",
    optimizer: str = "adamw",
    rank: int = RANK,
) -> tuple[list[FitRow], int]:
    """Return the rows of the table, and the number of parameters. Raises ConfigError."""
    dtype = dtype or ("bf16" if machine.device else "fp32")
    for value, names, what in ((dtype, DTYPES, "dtype"), (optimizer, OPTIMIZERS, "optimizer")):
        if value not in names:
            raise unknown_name(what, value, names)
    if batch < 1 or rank < 1:
        raise ConfigError(
            f"--batch is {batch} and --rank is {rank}, but both must be at least 1",
            hint="omit them for the defaults",
        )
    ask = Ask(model, batch, dtype, optimizer)
    fitting = Fitting(machine)
    rows = fitting.rows([ask, replace(ask, rank=rank)])
    return rows, fitting.placed(ask).params()


def command(
    model: str,
    *,
    device: str = "",
    ram: str = "",
    ssd: str = "",
    seq_len: int | None = None,
    batch: int = 1,
    dtype: str = "",
    optimizer: str = "adamw",
    rank: int = RANK,
    cluster: str = "",
    json: str = "",
    report: Callable[[str], None] = print,
) -> int:
    """Say whether a model can be trained here, with how much memory and with which command; the
    exit code is 1 if nothing fits. The model is a Hugging Face folder or config.json, a folder or
    file of safetensors, a named shape such as LLaMA-7B, or MODULE:FUNCTION.

    Raises ConfigError.

    Args:
        device: accelerator of another machine, such as "RTX 4090"; cpu: none (this machine)
        ram: its host memory, such as 64GB (that of this machine)
        ssd: its SSDs, such as 2x7GB/s,2TB (the disk of this directory)
        seq_len: tokens of a sample (4096 or the model's longest; a named shape: as published)
        batch: samples of a forward pass (1)
        dtype: dtype of parameters while they compute: fp32, bf16 or fp16 (bf16 with a device)
        optimizer: adamw, adam, sgd, lion, adagrad or rmsprop (adamw)
        rank: rank of the LoRA adapters (16)
        cluster: cluster.toml of `roadtrain probe` with measured rates, for tokens/s
        json: also write the answer as JSON to this file; -: print only JSON
    """
    quiet = json == "-"
    notes: list[str] = []
    loaded = model_of(model, seq_len, notes.append)
    machine = machine_of(device, ram, ssd)
    options: dict[str, Any] = {"batch": batch, "dtype": dtype, "optimizer": optimizer, "rank": rank}
    rows, params = fit(loaded, machine, **options)
    if cluster:
        rows = [replace(row, tokens_per_s=speed(row, cluster)) for row in rows]
    tree = to_json.dumps({**as_json(rows, machine, params), "notes": notes}, indent=1)
    report(tree if quiet else "\n".join([*notes, text_of(rows, machine, params)]))
    if json and not quiet:
        Path(json).write_text(tree + "\n")
    return 0 if best_of(rows) else 1
