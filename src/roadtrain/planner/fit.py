"""`roadtrain fit MODEL`: say whether a model can be trained on a machine, with how much memory, how
fast, and with which command. Reads configurations only: no weights, and usually no torch.

    model_of, machine_of    what is asked about (fit_inputs.py)
    evaluate                one row: a training with its state in one place
    least_change            what would make a row fit
    speed                   tokens/s, from a cluster file with measured rates
    command_of              the command that runs the best row
"""

from __future__ import annotations

import importlib
import json as to_json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from roadtrain.config.models import shape_of_layout
from roadtrain.errors import ConfigError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.budgets import LEAST_ACTIVATIONS
from roadtrain.options.names import unknown_name
from roadtrain.planner.fit_inputs import FitModel, Machine, machine_of, model_of
from roadtrain.planner.process_memory import Parts, PlacedLayout, Training
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.units import MIB, round_up, show_bytes, show_number, show_params

STATES = {"RAM": "in RAM", "SSDs": "on SSDs", "server": "on a server"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCHEMA = 1
RANK = 16  # of LoRA adapters
RESERVE = 0.95  # fraction of a device's free memory that fit plans with
BARELY = 0.05  # a row with a smaller fraction of a memory left fits barely
WHOLE = 1 << 50  # bytes; a budget that is always enough
SPEED_ERROR = 1.1  # the simulator's predictions are within 10 % (docs/benchmarks.md)


@dataclass(frozen=True)
class FitRow:
    """A line of the table. Sizes are in bytes.

    Attributes:
        training: What is trained.
        state: Where the state is: a key of STATES.
        host: Host memory of the process, by part, with the recommended budgets.
        device: Device memory by part; {} if the CPUs compute.
        least_host_bytes: Memory of the host with the smallest budgets.
        disk_bytes: Disk space, on the server if the state is there.
        server_bytes: Least memory of the server; 0 if the state is here.
        host_budget: Recommended `host_budget`.
        unused: Bytes of it for inputs of blocks, which this batch does not need.
        device_budget: Recommended `device_budget`; None if the CPUs compute.
        left: The smallest fraction of a memory that is left with the smallest budgets.
        lacking: Bytes that are lacking, by memory; empty if the row fits.
        change: What would make the row fit; "" if it fits.
        at_most: Limit of tokens/s by the described rate of the SSDs; 0 if unknown.
        tokens_per_s: Lower and upper limit; None if nothing was measured.
    """

    training: Training
    state: str
    host: Parts
    device: Parts
    least_host_bytes: float
    disk_bytes: float
    server_bytes: float
    host_budget: int
    unused: int
    device_budget: int | None
    left: float
    lacking: Mapping[str, float]
    change: str = ""
    at_most: float = 0.0
    tokens_per_s: tuple[float, float] | None = None

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def kind(self) -> str:
        rank = self.training.placed.rank
        return f"LoRA, rank {rank}" if rank else "full"

    @property
    def fits(self) -> str:
        return "no" if self.lacking else "barely" if self.left < BARELY else "yes"


def evaluate(training: Training, state: str, machine: Machine) -> FitRow:
    """Compute the memory of a row with the least and with the recommended budgets."""
    placed, needs = training.placed, dict[str, tuple[float, float]]()
    device = None
    if machine.device:
        device, least_device = _device_budget(training, machine)
        needs["device memory"] = least_device, machine.device_bytes
    whole = training.budgets(state, WHOLE, device, machine.ssds)
    least_budget = training.least_budget(state, whole)
    found = training.budgets(state, least_budget, device, machine.ssds)
    least = sum(training.memory(found)[0].values())
    needs["host memory"] = least, machine.ram
    disk = placed.file_bytes if state != "RAM" else 0
    if state == "SSDs" and machine.disk is not None:
        needs["disk"] = disk, machine.disk
    worker, blocks = whole.worker, len(placed.table.blocks) - 1
    if state == "RAM":  # more than some slots is no use
        preferred = least_budget + 16.0 * worker.slot_bytes
    else:  # the default is half of the memory; a quarter of what is not needed is for inputs
        useful = blocks * (worker.slot_bytes + worker.push_bytes)
        useful += placed.record_bytes * (state == "SSDs")
        preferred = min(machine.ram / 2, least_budget + 4 * useful / 3)
    most = min(preferred, least_budget + machine.ram - least)
    budget = max(least_budget, int(most) // MIB * MIB)
    found = training.budgets(state, budget, device, machine.ssds)
    host, on_device = training.memory(found)
    traffic = max(placed.written_bytes, placed.record_bytes - found.records.resident_bytes)
    tokens = training.samples * training.model.shape.tokens
    return FitRow(
        training,
        state,
        host,
        on_device,
        least,
        disk,
        placed.server_bytes if state == "server" else 0.0,
        budget,
        int(found.worker.activation_bytes - host["kept inputs"]),
        device,
        min((room - need) / max(room, 1.0) for need, room in needs.values()),
        {where: need - room for where, (need, room) in needs.items() if need > room},
        at_most=tokens * machine.ssd_rate / traffic if state == "SSDs" else 0.0,
    )


def _device_budget(training: Training, machine: Machine) -> tuple[int, float]:
    """Return the device budget, which is the memory that is left besides temporary tensors, and the
    least device memory of the process."""
    budgets = training.budgets("server", WHOLE, WHOLE)
    assert budgets.worker.device is not None
    least = replace(budgets.worker.device, slots=2, activation_bytes=LEAST_ACTIVATIONS)
    least_budget = round_up(least.total, MIB)
    used = training.memory(budgets)[1]
    # torch's gradients of the root block are counted both in the budget and as temporary
    root = training.placed.table.blocks[0].push_nbytes
    besides = used["libraries"] + used["temporary tensors"] - root
    free = int(RESERVE * machine.device_bytes - besides) // MIB * MIB
    return max(least_budget, free), least_budget + besides


def least_change(row: FitRow, machine: Machine) -> str:
    """Return the smallest change that makes the row fit; "" if it fits."""
    more = [f"{show_bytes(n)} more {where}" for where, n in row.lacking.items()]
    if not more or "disk" in row.lacking:
        return "; ".join(more)
    fits = (t for t, own in _smaller(row.training) if not evaluate(own, row.state, machine).lacking)
    return ", or ".join([" and ".join(more), *(text for text in [next(fits, "")] if text)])


def _smaller(training: Training) -> Iterator[tuple[str, Training]]:
    """Yield smaller trainings, the one that changes least first, each with its options."""
    model, samples, placed = training.model, training.samples, training.placed
    tokens = model.shape.tokens
    while samples > 1:
        samples //= 2
        yield f"--batch {samples}", replace(training, samples=samples)
    while tokens > 256 and not model.measured:
        tokens //= 2
        words = f"--batch 1 --seq-len {tokens}".removeprefix("--batch 1 " * (training.samples == 1))
        shape = shape_of_layout(model.layout, tokens, model.name)
        yield words, replace(training, samples=1, model=replace(model, shape=shape))
    if placed.dtype == "fp32":
        yield "--dtype bf16", replace(training, placed=replace(placed, dtype="bf16"))


def speed(row: FitRow, cluster_file: str) -> tuple[float, float] | None:
    """Predict the lowest and the highest tokens/s of a full fine-tune on a probed machine, whose
    blocks reach half to all of the measured rate of matrix products. Returns None where rates or
    the state's place are missing."""
    clusters, plans, compute, run = (
        importlib.import_module(f"roadtrain.{name}")
        for name in ("config.cluster", "config.plan_file", "simulator.compute", "simulator.run")
    )
    cluster, training = clusters.load_cluster(cluster_file), row.training
    worker = next(iter(cluster.workers), None)
    measured = worker is not None and f"hosts.{worker.name}.device" in cluster.measured
    there = {"RAM": True, "SSDs": worker and worker.ssds, "server": cluster.spares}[row.state]
    if not measured or not there or training.placed.rank:
        return None
    size = 4 if training.placed.dtype == "fp32" else 2
    state = OPTIMIZERS[training.placed.optimizer].state_nbytes + (0 if size == 4 else 4)
    plan = plans.make_plan(
        {
            "placement": {"RAM": "zero-offload", "SSDs": "files", "server": "server"}[row.state],
            "micro_batch": training.samples,
            "activation_checkpointing": True,
            "update_at": "step",  # as `roadtrain init` clips gradients
            "sizes": {"parameter_bytes": size, "gradient_bytes": size, "state_bytes": state},
        }
    )
    shape = training.model.shape
    tokens = training.samples * shape.tokens
    constants = [compute.Constants(efficiency=e, network=0.9, source="probed") for e in (0.5, 1.0)]
    seconds = [run.simulate(plan, cluster, shape, of, checked=False).seconds for of in constants]
    return tokens / max(seconds) / SPEED_ERROR, tokens / min(seconds) * SPEED_ERROR


def best_of(rows: Sequence[FitRow]) -> FitRow | None:
    """Return the row to recommend: the fastest that was measured, or else the first that fits; all
    parameters before LoRA, and this machine before a server."""

    def order(row: FitRow) -> tuple[bool, int, float]:
        fast = row.tokens_per_s[0] if row.tokens_per_s else 0.0
        return row.state == "server", row.training.placed.rank, -fast

    return min((row for row in rows if not row.lacking), key=order, default=None)


def command_of(row: FitRow, machine: Machine) -> str:
    """Return the command, or the line of a script, that runs a row with its budgets."""
    training, budget = row.training, f"{row.host_budget // MIB}MiB"
    dtype = training.placed.dtype
    device = None if row.device_budget is None else f"{row.device_budget // MIB}MiB"
    stores = [f"ssd{i}/run" for i in range(machine.ssds)]
    if not training.by_train:
        store = {"RAM": "None", "server": 'Servers(["HOST:4000"])'}.get(row.state)
        options = [f"store={store or to_json.dumps(stores)}", f'host_budget="{budget}"']
        options += [f'device_budget="{device}"'] if device else []
        options += [f"dtype=torch.{DTYPES[dtype]}"]
        line = f"optimizer = roadtrain.place(model, optimizer, {', '.join(options)})"
        return f"{line}  # with a LoRA model of PEFT" if training.placed.rank else line
    model = shlex.quote(training.model.pretrained)
    options = [
        f"--model.dtype {dtype}",
        f"--data.seq_len {training.model.shape.tokens} --data.batch_size {training.samples}",
        f"--optimizer.name {training.placed.optimizer} --budget.host {budget}",
    ]
    options += [f"--budget.device {device}"] if device else []
    options += ["--store.files '[]'"] if row.state == "RAM" else []
    options += [f"--store.files {','.join(stores)}"] * (row.state == "SSDs" and machine.ssds > 1)
    options += ["--servers.addresses HOST:4000"] if row.state == "server" else []
    return f"roadtrain init {model} --out job.toml && roadtrain train job.toml {' '.join(options)}"


def text_of(rows: Sequence[FitRow], machine: Machine) -> str:
    training, placed = rows[0].training, rows[0].training.placed
    tokens, many = training.model.shape.tokens, training.samples
    of = f" of {tokens} tokens" if tokens > 1 else ""
    head = ("training", "state", "device", "host (at least)", "disk", "tokens/s", "fits")
    measured = any(row.tokens_per_s for row in rows)
    lines = [
        f"{training.model.name}: {show_params(placed.params)} parameters; batches of {many}"
        f" sample{'s' * (many > 1)}{of}, {placed.dtype}, {placed.optimizer}",
        str(machine),
        *machine.notes,
        "",
    ]
    cells = [head, *(_cells(row) for row in rows)]
    if not measured and not any(row.at_most for row in rows):
        cells = [(*line[:-2], line[-1]) for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        lines.append("  ".join(f"{cell:{n}}" for cell, n in zip(line, widths)).rstrip())
    if not measured:
        lines.append("tokens/s: not measured (--cluster FILE, written by `roadtrain probe`)")
    if (best := best_of(rows)) is None:
        return "\n".join([*lines, "", "nothing fits"])
    parts = ", ".join(f"{name} {show_bytes(n)}" for name, n in best.host.items())
    spare = f"; {show_bytes(best.unused)} of the budget are not needed for inputs of blocks"
    lines += [
        "",
        f"best    {best.kind}, state {STATES[best.state]}",
        f"run     {command_of(best, machine)}",
        f"host    {parts}{spare * (best.unused > MIB)}",
    ]
    if best.server_bytes:
        lines.append(f"server  at least {show_bytes(best.server_bytes)} of memory")
    return "\n".join(lines)


def _cells(row: FitRow) -> tuple[str, ...]:
    there = f" and {show_bytes(row.server_bytes)} of memory there" if row.server_bytes else ""
    fast = f"at most {show_number(row.at_most)}" if row.at_most else "not measured"
    if row.tokens_per_s is not None:
        fast = " to ".join(map(show_number, row.tokens_per_s))
    return (
        row.kind,
        "a server" if row.state == "server" else row.state,
        show_bytes(row.device_bytes) if row.device else "-",
        f"{show_bytes(row.host_bytes)} ({show_bytes(row.least_host_bytes)})",
        show_bytes(row.disk_bytes) + there if row.disk_bytes else "-",
        fast,
        f"no: {row.change}" if row.lacking else row.fits,
    )


def as_json(rows: Sequence[FitRow], machine: Machine) -> dict[str, Any]:
    training, best = rows[0].training, best_of(rows)
    return {
        "schema": SCHEMA,
        "model": training.model.name,
        "params": training.placed.params,
        "batch": training.samples,
        "tokens": training.model.shape.tokens,
        "dtype": training.placed.dtype,
        "optimizer": training.placed.optimizer,
        "machine": asdict(machine),
        "rows": [
            {
                "training": row.kind,
                "fits": not row.lacking,
                **{own.name: getattr(row, own.name) for own in fields(row)[1:]},
                "host_bytes": row.host_bytes,
                "device_bytes": row.device_bytes,
                "command": command_of(row, machine),
            }
            for row in rows
        ],
        "best": None if best is None else rows.index(best),
        "notes": training.model.shape.notes,
    }


def fit(
    model: FitModel,
    machine: Machine,
    *,
    batch: int | None = None,
    dtype: str = "",
    optimizer: str = "adamw",
    rank: int = RANK,
) -> list[FitRow]:
    """Return the rows of the table. Raises ConfigError."""
    dtype = dtype or ("bf16" if machine.device else "fp32")
    for value, names, what in ((dtype, DTYPES, "dtype"), (optimizer, OPTIMIZERS, "optimizer")):
        if value not in names:
            raise unknown_name(what, value, names)
    samples = model.samples if batch is None else batch
    if samples < 1 or rank < 1:
        raise ConfigError(
            f"--batch is {samples} and --rank is {rank}, but both must be at least 1",
            hint="omit them for the defaults",
        )
    layouts = [PlacedLayout(model.layout, dtype, optimizer, own) for own in (0, rank)]
    # without matrices in blocks, LoRA trains nothing
    trainings = [Training(model, placed, samples) for placed in layouts if placed.written_bytes]
    rows = [evaluate(training, state, machine) for training in trainings for state in STATES]
    return [replace(row, change=least_change(row, machine)) for row in rows]


def command(
    model: str,
    *,
    device: str = "",
    ram: str = "",
    ssd: str = "",
    seq_len: int | None = None,
    batch: int | None = None,
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
        batch: samples of a forward pass (1; MODULE:FUNCTION: those that it returns)
        dtype: dtype of parameters while they compute: fp32, bf16 or fp16 (bf16 with a device)
        optimizer: adamw, adam, sgd, lion, adagrad or rmsprop (adamw)
        rank: rank of the LoRA adapters (16)
        cluster: cluster.toml of `roadtrain probe` with measured rates, for tokens/s
        json: also write the answer as JSON to this file; -: print only JSON
    """
    if json not in ("", "-"):
        check_file(Path(json))
    loaded, machine = model_of(model, seq_len), machine_of(device, ram, ssd)
    rows = fit(loaded, machine, batch=batch, dtype=dtype, optimizer=optimizer, rank=rank)
    if cluster:
        rows = [replace(row, tokens_per_s=speed(row, cluster)) for row in rows]
    tree = to_json.dumps(as_json(rows, machine), indent=1)
    text = "\n".join([*loaded.shape.notes, text_of(rows, machine)])
    report(tree if json == "-" else text)
    if json not in ("", "-"):
        replace_file(Path(json), f"{tree}\n".encode(), "writing")
    return 0 if best_of(rows) else 1
