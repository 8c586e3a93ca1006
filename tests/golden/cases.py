"""The trainings whose results the goldens keep: a model, an optimizer and a placement.

Each case has a `variant`: the same training in plain torch. Kept bits apply only where torch's
arithmetic equals that of the machine where they were made; the losses of the variant show
whether it does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import surface
import torch
import transformers
from safetensors.numpy import load_file
from torch import nn

import roadtrain

STEPS = 5
VOCAB = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """A residual layer of a perceptron."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x_BTD)))))


class Net(nn.Module):
    """Predicts the next of VOCAB symbols. frozen: Train only biases and norms."""

    def __init__(
        self, width: int = 8, depth: int = 2, dropout: float = 0.0, frozen: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(width, VOCAB)
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("norm" in name or "bias" in name)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h_BTD = self.embed(x_BT)
        for layer in self.layers:
            h_BTD = layer(h_BTD)
        return self.head(h_BTD)


# name -> how the optimizer is made, the state arrays and scalars of a parameter
OPTIMIZERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "adamw": (
        lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
        ("exp_avg", "exp_avg_sq", "step"),
    ),
    "adam": (
        lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.01, amsgrad=True, foreach=False),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    ),
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.125, foreach=False), ()),
    "momentum": (
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
        ("momentum_buffer",),
    ),
    "lion": (lambda ps: roadtrain.Lion(ps, lr=1e-3, weight_decay=0.1), ("exp_avg",)),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=1e-2, foreach=False), ("sum", "step")),
    "rmsprop": (
        lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5, centered=True, foreach=False),
        ("square_avg", "grad_avg", "momentum_buffer"),
    ),
    "radam": (
        lambda ps: torch.optim.RAdam(ps, lr=1e-2, foreach=False),
        ("exp_avg", "exp_avg_sq", "step"),
    ),
}


@dataclass(frozen=True)
class Variant:
    """A training in plain torch. If scaled, only the model's arithmetic is compared: torch does not
    unscale fp16 gradients, and its Adam breaks down in fp16."""

    optimizer: str = "adamw"
    dtype: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    scaled: bool = False  # uses a GradScaler; step 2 finds an inf and is skipped
    groups: bool = False  # two parameter groups
    wide: bool = True  # blocks of several chunks; False: the smallest model
    dropout: float = 0.0
    frozen: bool = False

    @property
    def name(self) -> str:
        """Names of the fields that differ from the defaults."""
        changed = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(changed) or "as default"


@dataclass(frozen=True)
class Case:
    """A placed training. where: "ram", a number of directories or of servers. options: Options of
    place()."""

    variant: Variant = Variant()
    where: str = "ram"
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = True  # equal bits to the same variant in RAM
    spills: bool = False


CHUNK = {"chunk_elements": 1 << 16}
TIGHT = Variant(accumulate=2, clip=0.5)
HALF = Variant(dtype="bf16")
LOSSES: dict[str, Case] = {
    "ram": Case(),
    "ram, small chunks": Case(options=CHUNK),
    "ram, eager": Case(options={"backwards_per_step": 1}),
    "files": Case(where="1 directory"),
    "files, eager": Case(where="1 directory", options={"backwards_per_step": 1, **CHUNK}),
    "three directories": Case(where="3 directories", options=CHUNK),
    "directories by rate": Case(where="2 directories", options={"store_rates": [1, 3], **CHUNK}),
    "buffered I/O": Case(where="1 directory", options={"direct": False}),
    "spilled": Case(TIGHT, "1 directory", {"budget": "40MiB", **CHUNK}, spills=True),
    "accumulated, clipped": Case(TIGHT),
    "accumulated, eager": Case(Variant(accumulate=2), "1 directory", {"backwards_per_step": 2}),
    "accumulated": Case(Variant(accumulate=2)),
    "groups, clipped": Case(Variant(groups=True, clip=0.5), "1 directory"),
    "dropout": Case(Variant(dropout=0.1), "1 directory"),
    "frozen": Case(Variant(frozen=True), "1 directory"),
    "bf16": Case(HALF, "1 directory"),
    "bf16, ram": Case(HALF),
    "bf16, two servers": Case(HALF, "2 servers", CHUNK),
    "fp16, scaled": Case(Variant(dtype="fp16", scaled=True), "1 directory"),
    "late": Case(where="1 directory", options={"staleness": 1}, exact=False),
    "late, ram": Case(options={"staleness": 1}, exact=False),
    "late, bf16, eager": Case(
        HALF, "1 directory", {"staleness": 1, "backwards_per_step": 1}, exact=False
    ),
    "top-k": Case(options={"topk": 0.02}, exact=False),
    "top-k, error feedback": Case(
        where="1 directory", options={"topk": 0.02, "error_feedback": True}, exact=False
    ),
    "top-k per block": Case(
        where="1 directory", options={"topk": 0.1, "topk_per_block": True}, exact=False
    ),
    "one server": Case(where="1 server"),
    "two servers": Case(where="2 servers", options=CHUNK),
    "replicas": Case(where="2 servers", options={"replicas": 2, **CHUNK}),
    "buffering none": Case(where="1 server", options={"buffering": "none"}),
    "gradients in bf16": Case(
        where="1 server", options={"grad_dtype": torch.bfloat16}, exact=False
    ),
    "gradients in fp16": Case(
        where="2 servers", options={"grad_dtype": torch.float16, **CHUNK}, exact=False
    ),
    "server, late": Case(where="1 server", options={"staleness": 1}, exact=False),
    "server, top-k": Case(where="2 servers", options={"topk": 0.02, **CHUNK}, exact=False),
    "server, top-k, error feedback": Case(
        where="1 server",
        options={"topk": 0.02, "error_feedback": True, "store": "residuals"},
        exact=False,
    ),
    "relay": Case(where="1 server", options={"relay": "64MiB"}),
    **{
        f"{name}, files": Case(Variant(name), "1 directory")
        for name in OPTIMIZERS
        if name != "adamw"
    },
    "sgd, ram": Case(Variant("sgd")),
    "lion, bf16": Case(Variant("lion", dtype="bf16"), "1 directory"),
    "momentum, server": Case(Variant("momentum"), "1 server"),
}

TINY = Variant(wide=False)
STORED = 3  # steps that a kept store has trained
STORES: dict[str, Case] = {
    "one": Case(TINY, "1 directory"),
    "two": Case(Variant(wide=False, groups=True), "2 directories"),
    "topk": Case(TINY, "1 directory", {"topk": 0.2, "error_feedback": True}, exact=False),
    "bf16": Case(Variant(wide=False, dtype="bf16"), "1 directory"),
    "late": Case(TINY, "1 directory", {"staleness": 1}, exact=False),
    "frozen": Case(Variant(wide=False, frozen=True), "1 directory"),
    "fp16": Case(Variant(wide=False, dtype="fp16", scaled=True), "1 directory"),
    "momentum": Case(Variant("momentum", wide=False), "1 directory"),
    "lion": Case(Variant("lion", wide=False), "1 directory"),
    "radam": Case(Variant("radam", wide=False), "1 directory"),
    "server": Case(TINY, "1 server"),
    "servers": Case(TINY, "2 servers"),
    "replicas": Case(TINY, "2 servers", {"replicas": 2}),
    "server-topk": Case(
        TINY, "1 server", {"topk": 0.2, "error_feedback": True, "store": "residuals"}, exact=False
    ),
}


def build(variant: Variant) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    width, depth = (192, 3) if variant.wide else (8, 2)
    model = Net(width, depth, variant.dropout, variant.frozen)
    params: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if variant.groups:
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        params = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=2, enabled=variant.scaled
    )
    return model, OPTIMIZERS[variant.optimizer][0](params), scaler


def one_step(
    variant: Variant, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, number: int
) -> float:
    """Step `number`, from 0, as a user would write it."""
    torch.manual_seed(1000 + number)
    total = 0.0
    for _ in range(variant.accumulate):
        x_BT = torch.randint(0, VOCAB, (4, 16))
        loss = nn.functional.cross_entropy(
            model(x_BT).float().flatten(0, 1), x_BT.roll(1, 1).flatten()
        )
        blown = loss * float("inf") if variant.scaled and number == 2 else loss
        scaler.scale(blown / variant.accumulate).backward()
        total += loss.item()
    if variant.clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


@functools.cache
def plain_losses(variant: Variant) -> tuple[str, ...]:
    """Losses of plain torch, as hex, for as many steps as the training and its resumption."""
    model, optimizer, scaler = build(variant)
    model.to(DTYPES[variant.dtype])
    if variant.scaled:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)
        scaler, variant = torch.amp.GradScaler("cpu", enabled=False), replace(variant, scaled=False)
    return tuple(one_step(variant, model, optimizer, scaler, i).hex() for i in range(STORED + 3))


@contextlib.contextmanager
def placed(case: Case, home: Path) -> Iterator[tuple[nn.Module, Any, torch.amp.GradScaler]]:
    """Place the case's model on files or servers below `home`, resuming an existing store."""
    model, optimizer, scaler = build(case.variant)
    options = {"dtype": DTYPES[case.variant.dtype]} if case.variant.dtype != "fp32" else {}
    if case.variant.scaled:
        options["extra"] = {"scaler": scaler}
    options |= case.options
    count, _, kind = case.where.partition(" ")
    with contextlib.ExitStack() as stack:
        if kind.startswith("director"):
            options["store"] = [home / f"store{i}" for i in range(int(count))]
        elif kind.startswith("server"):
            options["servers"] = stack.enter_context(
                surface.serving([home / f"server{i}" for i in range(int(count))])
            )
            if "store" in options:
                options["store"] = home / options["store"]
        yield model, stack.enter_context(surface.place(model, optimizer, **options)), scaler


def contents(case: Case, model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Name -> SHA-256 of every parameter, its state, and every buffer."""
    out = {}
    for name, parameter in model.named_parameters():
        whats = (
            ("master", *OPTIMIZERS[case.variant.optimizer][1])
            if parameter.requires_grad
            else ("master",)
        )
        for what in whats:
            out[f"{name}:{what}"] = hashlib.sha256(
                np.ascontiguousarray(optimizer.read(name, what)).tobytes()
            ).hexdigest()[:16]
    return out | {
        name: hashlib.sha256(b.numpy().tobytes()).hexdigest()[:16]
        for name, b in model.named_buffers()
    }


def digest(of: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(of.items())).encode()).hexdigest()


def train(case: Case, home: Path, first: int, last: int) -> dict[str, Any]:
    """Train steps `first` to `last`. Returns losses and norms as hex, and a digest of the store."""
    losses, norms = [], []
    with surface.counting_spills() as spilled, placed(case, home) as (model, optimizer, scaler):
        assert optimizer.steps_done == first, (optimizer.steps_done, first)
        for i in range(first, last):
            losses.append(one_step(case.variant, model, optimizer, scaler, i).hex())
            norms.append(float(optimizer.grad_norm()).hex())
        found = contents(case, model, optimizer)
    assert bool(spilled) == case.spills, f"{len(spilled)} gradients were spilled"
    return {"losses": losses, "norms": norms, "contents": digest(found)}


# jobs

TEXT = "".join(f"Line {i}: {i * i % 97} trailers, {i * 7 % 13} of them full.\n" for i in range(80))
MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
JOB = """[run]
dir = "run"
seed = 3
device = "cpu"
[data]
paths = ["text.txt"]
seq_len = 16
batch_size = 2
held_out = 0.1
[optimizer]
lr = 1e-2
clip_norm = 1.0
accumulate = 2
warmup_steps = 2
[budget]
host = "64MiB"
[model.config]
""" + "".join(
    f"{key} = {str(value).lower() if value is True else repr(value)}\n"
    for key, value in MODEL.items()
).replace("'", '"')


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def at(home: Path, *words: str) -> str:
    """Output of `roadtrain WORDS` in directory `home`."""
    with inside(home):
        code, text = surface.command(*words)
    assert code == 0, (words, text)
    return text


def train_job(home: Path, steps: int, *words: str) -> list[dict[str, Any]]:
    """Run `roadtrain train` in `home` up to step `steps`, on two servers if `home` is called
    "served" or has the directories of servers. Returns the lines of metrics."""
    with served(home) as more:
        at(home, "train", "job.toml", "--run.steps", str(steps), *more, *words)
    return [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def served(home: Path) -> Iterator[list[str]]:
    if home.name != "served" and not (home / "server0").exists():
        yield []
        return
    with surface.serving([home / "server0", home / "server1"]) as where:
        yield ["--store.servers", json.dumps(where)]


def exported(home: Path) -> dict[str, Any]:
    """SHA-256 of every tensor in both exports of a run directory."""
    found: dict[str, Any] = {}
    with served(home) as more:
        if more:  # the run directory names the ports of an earlier run
            path = home / "run" / "job.toml"
            path.write_text(
                re.sub(r"(servers|addresses) = \[[^]]*\]", rf"\1 = {more[1]}", path.read_text())
            )
        for name, words in (("exported", []), ("masters", ["--masters"])):
            to = home / "out" / name
            at(home, "export", "run", str(to), *words)
            files = sorted(to.glob("*.safetensors"))
            found[name] = {
                tensor: hashlib.sha256(value.tobytes()).hexdigest()
                for file in files
                for tensor, value in load_file(file).items()
            }
    return found


def lasting(line: dict[str, Any]) -> dict[str, Any]:
    """Entries of a line of metrics that do not depend on a clock."""
    return {key: line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")}


def types_of(value: Any) -> Any:
    """Keys of a line of metrics with the types of their values, limited to stages that all lines
    have."""
    if isinstance(value, dict):
        left_out = SOMETIMES | {"memory", "committed"}  # lines of the kept runs lack these two
        return {key: types_of(entry) for key, entry in value.items() if key not in left_out}
    return type(value).__name__


ALWAYS = {"Forward", "Backward", "Fetch", "Push", "Sum", "Update", "Write", "Commit"}
SOMETIMES = {
    "Read",
    "Update",
    "Write",
    "Commit",
    "Wait",
    "Sum",
    "Fetch",
    "Push",
}  # stages that some lines lack


def stages_in(lines: list[dict[str, Any]]) -> set[str]:
    return {name for line in lines for name in line["stages"]}


@functools.cache
def plain_job_losses() -> tuple[str, ...]:
    """Losses of plain torch for the model of the kept jobs."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODEL, vocab_size=256)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    for _ in range(5):
        x_BT = torch.randint(0, 256, (2, 16))
        logits_BTV = model(input_ids=x_BT, use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), x_BT.roll(1, 1).flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return tuple(losses)


# A non-default value for every key of a job in the second edition, under its name in that edition.
JOB_VALUES: dict[str, Any] = {
    "run.dir": "here",
    "run.steps": 7,
    "run.minutes": 1.5,
    "run.device": "cpu",
    "run.seed": 5,
    "run.new_store": True,
    "run.log_every": 3,
    "model.config": {"model_type": "llama", "hidden_size": 8},
    "model.dtype": "bf16",
    "model.blocks": ["layers.*"],
    "data.paths": ["a.txt", "b"],
    "data.seq_len": 32,
    "data.batch_size": 4,
    "data.held_out": 0.25,
    "data.tokenizer": "tokenizer.json",
    "optimizer.name": "lion",
    "optimizer.lr": 0.5,
    "optimizer.weight_decay": 0.25,
    "optimizer.betas": [0.5, 0.75],
    "optimizer.eps": 0.125,
    "optimizer.momentum": 0.5,
    "optimizer.options": {"nesterov": True},
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0.5,
    "optimizer.accumulate": 2,
    "optimizer.staleness": 1,
    "store.dirs": ["{run}/a", "b"],
    "store.servers": ["h:1", "h:2"],
    "store.moved_from": ["c"],
    "store.relay": "64MiB",
    "store.buffering": "all",
    "store.replicas": 2,
    "store.give_up": ["h:1"],
    "store.token_file": "t",
    "store.ca": "ca",
    "store.cert": "cert",
    "store.key": "key",
    "store.connections": 2,
    "store.rates": [1.0, 2.0],
    "store.chunk_elements": 65536,
    "store.direct": False,
    "budget.host": "1GiB",
    "compress.topk": 2.0,
    "compress.error_feedback": True,
    "compress.gradients": "bf16",
}

# frames and sums

BESIDES: dict[str, Any] = {
    "hello": ("session", 1, 4, -2, 0, "signature"),
    "hello of a summation": ("session", 1, 4, "sum"),
    "without": ("job", "link", (0, 2)),
    "rounds": {3: (4, 5), 1: (0, 0)},
    "stalled": ([("tensor 3", 1, "fp32")], [("tensor 4", 2, "bf16")]),
}
CODECS = ("bf16", "fp16", "topk:0.1", "onebit", "dither:2", "dither:4", "dither:8")


def values(n: int, seed: int) -> np.ndarray:
    """Random fp32 values of many magnitudes, including both zeros."""
    rng = np.random.default_rng(seed)
    out = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 3, n)).astype(np.float32)
    out[:2] = 0.0, -0.0
    return out


def summed() -> dict[str, Any]:
    """Frames that a reducer sends to three workers, in each format."""
    arrays = [values(50, rank) for rank in range(3)]
    out = {form: surface.summed("sum", form, arrays, 2) for form in ("fp32", *CODECS)}
    return out | {"accumulated": surface.summed("accumulate", "fp32", arrays, 2)}


def codecs() -> dict[str, Any]:
    """For each codec the encoded bytes, the decoded values and, with a residual, the new
    residual."""
    out: dict[str, Any] = {}
    for form in CODECS:
        raw = surface.encoded_as(form, values(101, 7), 12345)
        sent, kept = surface.residual_after(form, values(101, 8), values(101, 9), 5)
        back = surface.decoded_as(form, raw, 101)
        out[form] = [raw.hex(), back.tobytes().hex(), sent.hex(), kept.tobytes().hex()]
    return out


# the order of operations

ORDERS: dict[str, Case] = {
    "ram": Case(TINY),
    "files": Case(TINY, "1 directory"),
    "accumulated, eager": Case(
        Variant(wide=False, accumulate=2), "1 directory", {"backwards_per_step": 2}
    ),
    "late": Case(TINY, "1 directory", {"staleness": 1}),
    "top-k": Case(TINY, "1 directory", {"topk": 0.2}),
}
# leaves out actions whose order depends on when a pull arrives: answers, and reads of records in
# memory
STEADY = ("Hold", "Update", "Write", "Stash", "Discard", "Total", "Prepare")


def real_order(name: str) -> dict[str, list[str]]:
    """Block -> actions of its server on its chunks in four steps; "held": order of Hold over all
    blocks except the root."""
    case = ORDERS[name]
    with (
        tempfile.TemporaryDirectory() as home,
        surface.logged_actions() as log,
        placed(case, Path(home)) as (model, optimizer, scaler),
    ):
        blocks = surface.blocks_of(optimizer)
        for i in range(4):
            one_step(case.variant, model, optimizer, scaler, i)
            optimizer.flush()  # otherwise writes overlap the next step
    out: dict[str, list[str]] = {}
    for what, chunk in log:
        if what in STEADY and chunk in blocks:
            out.setdefault(f"block {blocks[chunk]}", []).append(what)
    out["held"] = [f"block {blocks[c]}" for what, c in log if what == "Hold" and blocks.get(c)]
    return out


SIMULATED_ORDERS = {
    "files": ("files", 0, 2),
    "ram": ("zero-offload", 0, 2),
    "late": ("zero-offload", 1, 3),
}


def simulated_order(name: str) -> str:
    return "\n".join(surface.simulated_order(*SIMULATED_ORDERS[name], depth=4)) + "\n"


# simulated results


def simulations() -> list[list[str]]:
    """Arguments of `roadtrain simulate` and `plan`; MIXED stands for mixed.toml beside this
    file."""
    everywhere = [
        "ddp",
        "zero1",
        "zero3",
        "zero-offload",
        "zero-infinity",
        "raid0",
        "parameter-server",
        "switch-sum",
        "summation",
        "files",
        "near-storage",
        "smartnic",
        "optimizer-node",
        "server",
    ]
    xl = ["--model", "GPT-2-XL", "--recompute"]
    own = ["zero-offload", "zero-infinity", "raid0", "files"]
    out = [["simulate", "workstation", *xl, "--placement", name] for name in own]
    refused = ("switch-sum", "near-storage", "smartnic", "optimizer-node")
    out += [
        ["simulate", "servers", *xl, "--placement", name]
        for name in everywhere
        if name not in refused
    ]
    out += [["simulate", "MIXED", *xl, "--placement", name] for name in everywhere]
    late = ["simulate", "workstation", *xl, "--placement"]
    out += [
        [*late, "zero-offload", "--staleness", "1"],
        [*late, "files", "--topk", "2"],
        [*late, "zero-offload", "--micros", "4", "--micro-batch", "2"],
        ["simulate", "servers", *xl, "--tp", "4", "--pp", "2", "--micros", "4"],
        [
            "simulate",
            "servers",
            *xl,
            "--pp",
            "4",
            "--vp",
            "2",
            "--micros",
            "8",
            "--placement",
            "zero1",
        ],
        ["simulate", "servers", *xl, "--cp", "2", "--constants", "luwu"],
    ]
    out += [
        [
            "plan",
            "workstation",
            "--model",
            "GPT-2-XL",
            "--batch",
            "4",
            "--placements",
            "zero-offload,files",
        ],
        [
            "plan",
            "MIXED",
            "--model",
            "GPT-2",
            "--batch",
            "8",
            "--goal",
            "energy",
            "--placements",
            "zero3,summation",
        ],
    ]
    return out


def simulated(words: list[str]) -> Any:
    words = [
        str(Path(__file__).parent / "mixed.toml") if word == "MIXED" else word for word in words
    ]
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out.json"
        more = ["--out", str(Path(home) / "plan.toml")] if words[0] == "plan" else []
        assert surface.command(*words, *more, "--json", str(out))[0] == 0, words
        tree = json.loads(out.read_text())
    if words[0] == "simulate":
        return surface.simulated(tree)
    found = {
        name: surface.simulated(tree[name]) if tree[name] else None
        for name in ("pick", "runner_up")
    }
    return found | {
        "gains": tree["gains"],
        "front": [surface.simulated(plan) for plan in tree["front"]],
        "families": [
            [family["placement"], family["tried"], family["simulated"], family["pruned"]]
            for family in tree["families"]
        ],
    }


def reproduced(paper: str) -> dict[str, float | None]:
    """Row of the paper -> the simulator's value."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out.json"
        assert surface.command("reproduce", paper, "--json", str(out))[0] == 0
        return {row["id"]: row["ours"] for row in json.loads(out.read_text())}
