"""Convert the rows of measured.json to plans on clusters.

If a report lacks a detail, this module assumes a value for the whole family, with the reason beside
it. No assumption depends on the id of a run. Between devices of a host, collectives are assumed to
reach 0.72 of NVLink's peak rate in one direction, as NCCL's published all-reduces of 268 MB do on
A100 (217 of 300 GB/s). For LLM Foundry and vTrain, the rate was fitted to their runs instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from json import loads
from typing import Any, Literal

from benchmarks.planner.paper_clusters import fitted, gpt
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import NAMES, ModelShape, Transformer, shape
from roadtrain.config.plan_file import ElementBytes, Framework, Plan, PlanMemory, placement
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.simulator.memory import cut, needs
from roadtrain.stages.parallelism import Parallelism, even
from roadtrain.units import parse_rate

# torchtitan's names for activation checkpointing of a part of each layer
TORCHTITAN_AC: Mapping[str, Literal["", "products", "layers"]] = {
    "selective": "products",
    "selective op": "products",
    "selective layer": "layers",
}

MPT = {
    "70b": (80, 8192, 64),
    "30b": (48, 7168, 56),
    "13b": (40, 5120, 40),
    "7b": (32, 4096, 32),
    "3b": (32, 2560, 20),
    "1b": (24, 2048, 16),
    "760m": (24, 1536, 12),
    "350m": (24, 1024, 16),
    "125m": (12, 768, 12),
}
SAILOR = {
    "OPT-350M": (24, 1024, 16),
    "GPT-Neo-1.3B": (24, 2048, 16),
    "GPT-Neo-2.7B": (32, 2560, 20),
}
# prefixes of the metrics that are used
METRICS = ("iteration_time", "tokens_per_s", "peak_alloc", "peak_memory")
UNITS = {"ms": 1e-3, "s": 1.0, "GiB": 2.0**30, "bytes": 1.0}


@dataclass(frozen=True)
class Run:
    """A measured run. `seconds`: time of a step; `peak`: bytes of the fullest device. A value that
    was not measured is 0.
    """

    id: str
    family: str
    size: str
    cluster: Cluster
    model: ModelShape
    plan: Plan
    seconds: float = 0.0
    peak: float = 0.0


@cache
def all_runs() -> tuple[Run, ...]:
    return tuple(
        _run(row)
        for row in loads(files("benchmarks.planner").joinpath("measured.json").read_text())
    )


def runs_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Run], dict[str, str]]:
    """Convert rows with the fields of measured.json. Returns (runs, the reason for each id of a row
    that has no plan).
    """
    found, refused = [], {}
    for i, row in enumerate(rows):
        try:
            found.append(_run(dict(row)))
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            AssertionError,
            ZeroDivisionError,
            RoadtrainError,
        ) as error:
            refused[str(row.get("id", i))] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found, refused


def named(text: str) -> ModelShape:
    """Return the shape of the model that a report calls `text`. Raises ConfigError if no model has
    the name.
    """

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower().replace("3.1", "3"))

    return shape(next((name for name in NAMES if plain(name) == plain(text)), text))


def device_peak(run: Run) -> float:
    """Compute the predicted memory in bytes of the fullest device of a run."""
    stages = [
        [block for part in parts for block in part] for parts in cut(run.model.blocks, run.plan)
    ]
    hosts = [run.cluster.workers[0]] * len(stages)
    found = needs(run.plan, run.cluster, stages, hosts)
    return max(need.nbytes for need in found if need.where.endswith("device"))


def cluster(n: int, most: int, device: str, inside: str, network: str) -> Cluster:
    """Describe hosts with `n` devices, at most `most` each."""
    hosts = -(-n // most)
    nics = [{"kind": "infiniband", "rate": network}] if hosts > 1 else []
    host = {
        "name": "host",
        "count": hosts,
        "devices": min(n, most),
        "device": device,
        "fabric": inside,
        "memory": "1TB",
        "memory_rate": "200GB/s",
        "nics": nics,
    }
    return make_cluster({"name": device, "hosts": [host]})


def _run(row: dict[str, Any]) -> Run:
    if row["group"] not in _FAMILIES or not row["metric"].startswith(METRICS):
        raise ConfigError(
            f"metric {row['metric']!r} of group {row['group']!r} is not used: only step times and "
            "peak memory of known groups are compared"
        )
    family, size, where, model, plan = _FAMILIES[row["group"]](row)
    acts = any(is_yes(value) for key, value in row["parallelism"].items() if "offload_act" in key)
    params = any(
        is_yes(value) for key, value in row["parallelism"].items() if "offload_param" in key
    )
    elsewhere = plan.placement.parameters == "host" or plan.placement.state == "host"
    if (
        (offloads(row["parallelism"]) and not elsewhere)
        or acts != plan.memory.offload
        or (params and not elsewhere)
    ):
        raise ConfigError(
            f"group {row['group']!r}: this kind of offloading cannot be converted to a plan"
        )
    value = row["value"] * UNITS.get(row["unit"], 1.0)
    if "memory" in row["metric"] or "alloc" in row["metric"]:
        return Run(row["id"], family, size, where, model, plan, peak=value)
    if row["unit"] == "tokens/s/GPU":
        value = plan.samples * model.tokens / plan.parallelism.devices / value
    elif row["unit"].startswith("tokens/s"):
        value = plan.samples * model.tokens / value
    return Run(row["id"], family, size, where, model, plan, seconds=value)


def is_yes(value: Any) -> bool:
    """Check whether a value in a report means yes; values such as None, "none", "n/a" and false
    mean no.
    """
    return str(value).strip().lower() not in ("", "none", "null", "n/a", "no", "false", "off", "0")


def offloads(how: Mapping[str, Any]) -> str | None:
    """Return the place to which the optimizer state is offloaded, such as "cpu". The result is ""
    if the state is not offloaded, and None if the report does not mention offloading.

    Args:
        how: field `parallelism` of a row
    """
    keys = [
        key for key in how if key.startswith("offload") and "act" not in key and "param" not in key
    ]
    if where := [str(how[key]) for key in keys if is_yes(how[key])]:
        return where[0].lower()
    return "cpu" if is_yes(how.get("zenflow")) else "" if keys else None


RunParts = tuple[str, str, Cluster, ModelShape, Plan]


def _vtrain(row: dict[str, Any]) -> RunParts:
    how, batch, n = row["parallelism"], row["batch"], row["n_gpus"]
    h, layers, heads, s = (
        int(_found(rf"\b{k}=(\d+)", row["model"])) for k in ("h", "L", "heads", "s")
    )
    num_microbatches = batch["global_batch"] // how["dp"] // batch["micro_batch"]
    plan = Plan(
        placement("ddp"),
        Parallelism(how["dp"], how["tp"], how["pp"]),
        batch["micro_batch"],
        num_microbatches,
        activation_checkpointing=True,
        overlap=False,
    )
    where = cluster(n, 8, "A100-80GB", "230GB/s", "800Gbit/s")
    return row["group"], f"{h}x{layers}", where, gpt(layers, h, heads, seq_len=s), plan


def _foundry(row: dict[str, Any]) -> RunParts:
    """Convert a row of LLM Foundry, which uses FSDP."""
    # With amp_fp8, kernels access memory three times as often (fitted to four runs), because inputs
    # are first cast, transposed and searched for their maximum.
    how, batch, n = row["parallelism"], row["batch"], row["n_gpus"]
    size, length = re.search(r"MPT-(\w+) .*seq (\d+)", row["model"]).groups()  # type: ignore[union-attr]
    h100, fp8 = row["hardware"].startswith("h100"), how["precision"] == "amp_fp8"
    device = "H100-80GB" if h100 else "A100-80GB" if "80gb" in row["hardware"] else "A100-40GB"
    inside, outside = ("400GB/s", "3200Gbit/s") if h100 else ("230GB/s", "1600Gbit/s")
    where = cluster(n, 8, device, inside, outside)
    model = Transformer(*MPT[size], 50368, int(length), fused=True, biases=False).shape(
        f"MPT-{size}"
    )
    plan = Plan(
        placement("zero3"),
        Parallelism(dp=n),
        batch["micro_batch"],
        batch["grad_accum"],
        activation_checkpointing=is_yes(how["activation_ckpt"]),
        memory=PlanMemory(slots=2, offload=is_yes(how.get("cpu_offload_act"))),
        framework=Framework(precision="fp8" if fp8 else "", passes=3 if fp8 else 1),
    )
    return "foundry-h100" if h100 else "foundry-a100", size, where, model, plan


def _titan(row: dict[str, Any]) -> RunParts:
    """Convert a row of torchtitan: FSDP2 in bf16 with sharded fp32 parameters, 16 bytes a
    parameter.
    """
    # With a pipeline, parameters stay gathered from forward to backward, and gradients accumulate
    # unsharded in fp32. The loss is in fp32: the logits, their copy, the log-softmax and its
    # gradient take 2 + 4 + 4 + 4 bytes, and with tensor parallelism 4 more, for the exponent. With
    # asynchronous tensor parallelism, a sum is divided by tp, and only the time of one share is not
    # hidden. The reported memory is what the allocator reserved, without the CUDA context: without
    # compilation, 6 % more than the memory in use. Compiled kernels access memory half as often.
    how, batch, n = row["parallelism"], row["batch"], row["n_gpus"]
    name, length = (
        _found(r"(Llama-[\d.]+-\d+B)", row["model"]),
        int(_found(r"seq (\d+)", row["model"])),
    )
    rates = ("H100-96GB", "325GB/s", "3200Gbit/s")
    if "A100" in row["hardware"]:
        rates = ("A100-80GB", "230GB/s", "1600Gbit/s")
    where = cluster(n, 8, *rates)
    pp = how.get("pp", 1)
    parallelism = Parallelism(
        how["fsdp"],
        how.get("tp", 1),
        pp,
        cp=how.get("cp", 1),
        virtual_stages=2 if "Interleaved" in how.get("schedule", "") else 1,
    )
    compiled = "compile" in how.get("tech", "")
    ac = how.get("ac", "")
    plan = Plan(
        placement("zero1" if pp > 1 else "zero3"),
        parallelism,
        batch["local"] // pp,
        pp,
        activation_checkpointing=ac == "full",
        memory=PlanMemory(slots=2),
        framework=Framework(
            selective=TORCHTITAN_AC.get(ac, ""),
            logit_bytes=18 if parallelism.tp > 1 else 14,
            hidden=1 - 1 / parallelism.tp if how.get("async_tp") else 0,
            context_bytes=0,
            outputs=True,
            fragmentation=1.0 if compiled else 1.06,
            passes=0.5 if compiled else 1.0,
            precision="fp8" if "float8" in how.get("tech", "").lower() else "",
        ),
        sizes=ElementBytes(gradient_bytes=4 if pp > 1 else 2, state_bytes=16 if pp > 1 else 12),
    )
    return row["group"], name, where, shape(named(name).name, seq_len=length), plan


def _simumax(row: dict[str, Any]) -> RunParts:
    """Convert a row of SimuMax: Megatron-LM with its distributed optimizer and a fused loss."""
    # The loss stores 16-bit logits and their fp32 softmax, which becomes the gradient. The gradient
    # of the output layer is computed in fp32, in memory beside the buffer to which it is added. The
    # reported memory is torch's count of allocated bytes, without the CUDA context. A reduced
    # DeepSeek-V3 has one dense layer.
    how, batch = row["parallelism"], row["batch"]
    name, reduced = re.match(r"(\w+?)(?:_l(\d+))?(?: |$)", row["model"]).groups()  # type: ignore[union-attr]
    full = named(name).name
    model = shape(
        full,
        seq_len=batch["seq"],
        layers=int(reduced) if reduced else None,
        dense=1 if reduced and full.startswith("DeepSeek") else None,
    )
    parallelism = Parallelism(how["dp"], how["tp"], how["pp"], cp=how["cp"], ep=how["ep"])
    plan = Plan(
        placement("zero1"),
        parallelism,
        batch["micro_batch"],
        batch["num_microbatches"],
        overlap=False,
        sizes=ElementBytes(gradient_bytes=4),
        framework=Framework(output_bytes=4, context_bytes=0),
    )
    return row["group"], name, cluster(8, 8, "B200-180GB", "650GB/s", ""), model, plan


def _bridge(row: dict[str, Any]) -> RunParts:
    """Convert a row of Megatron-Bridge, with its distributed optimizer or FSDP."""
    # Gradients are sent during backward. If the layers do not divide evenly, the embedding and the
    # loss count as one layer each. The NVLink of a rack joins 72 devices, of which a job uses 64.
    # If a release does not name the precision, fp8 is assumed, because the published 763 TFLOP/s on
    # H100 cannot be reached in bf16.
    how, batch, n = row["parallelism"], row["batch"], row["n_gpus"]
    kind = row["hardware"].removeprefix("DGX-")
    device, inside, outside, most = {
        "GB300": ("GB300-279GB", "650GB/s", 800, 64),
        "GB200": ("GB200-186GB", "650GB/s", 400, 64),
        "B200": ("B200-180GB", "650GB/s", 400, 8),
        "B300": ("B300-270GB", "650GB/s", 800, 8),
        "H100": ("H100-80GB", "325GB/s", 400, 8),
    }[kind]
    name = named(row["model"]).name
    tp, pp, cp, vp, fsdp = (
        int(how[key]) if str(how.get(key)).isdigit() else 0
        for key in ("tp", "pp", "cp", "vp", "fsdp")
    )
    model, micro = shape(name, seq_len=int(batch["seq"])), int(batch["micro_batch"])
    vp = max(1, vp if pp > 1 else 1)
    stages = () if model.layers % (pp * vp) == 0 else even(model.layers + 2, pp * vp)
    if stages:
        stages = (stages[0] - 1, *stages[1:-1], stages[-1] - 1)
    parallelism = Parallelism(n // (tp * pp * cp), tp, pp, stages, cp=cp, virtual_stages=vp)
    stated = str(how["precision"])
    precision = (
        "nvfp4" if stated.startswith("NVFP4") else "" if stated.startswith("BF16") else "fp8"
    )
    plan = Plan(
        placement("zero3" if fsdp > 1 else "zero1"),
        parallelism,
        micro,
        int(batch["global_batch"]) // micro // parallelism.dp,
        sizes=ElementBytes(gradient_bytes=2 if fsdp > 1 else 4),
        memory=PlanMemory(slots=2),
        framework=Framework(precision=precision),
    )
    where = cluster(n, most, device, inside, f"{outside * min(n, most)}Gbit/s")
    return f"megatron-{kind.lower()}", name, where, model, plan


def _sailor(row: dict[str, Any]) -> RunParts:
    """Convert a row of Sailor: Megatron-DeepSpeed in fp16, with fp32 copies of parameters and
    gradients, and without sequence parallelism.
    """
    # Gradients are summed after backward. The reported numbers of layers include the embedding and
    # the output. Attention is not fused: for each score, the fp32 softmax, its 16-bit copy, the
    # output of dropout, the mask of dropout and the causal mask take 4 + 2 + 2 + 1 + 1 bytes. Two
    # assumptions match the measured memory: the small devices of the mixed cluster recompute
    # layers, and GH200 has 2.8 GB of other memory in use. The report names the hosts of each stage,
    # and the slowest of these hosts sets the pace. The network between these hosts gave 12 MB/s.
    how, batch = row["parallelism"], row["batch"]
    name, length = _found(r"(\S+) ", row["model"]), int(_found(r"seq (\d+)", row["model"]))
    if name not in SAILOR:
        raise ConfigError(f"unknown model {name}, known are {', '.join(SAILOR)}")
    layers, h, heads = SAILOR[name]
    tp, pp, dp = how["tp"], how["pp"], how["dp"][0]
    stages = list(how["layers_per_stage"])
    stages[0], stages[-1] = stages[0] - 1, stages[-1] - 1
    model, mixed = (
        gpt(layers, h, heads, vocab=50304, seq_len=length, score_bytes=10),
        row["group"] == "sailor-hetero",
    )
    plan = Plan(
        placement("ddp"),
        Parallelism(dp, tp, pp, tuple(stages) if pp > 1 else ()),
        batch["micro_batch"],
        batch["global_batch"] // batch["micro_batch"] // dp,
        overlap=False,
        activation_checkpointing=mixed,
        framework=Framework(sequence=False, logit_bytes=10, context_bytes=1e9 if mixed else 2.8e9),
        sizes=ElementBytes(state_bytes=16),
    )
    if not mixed:
        where = cluster(row["n_gpus"], 4, "GH200-96GB", "120GB/s", "800Gbit/s")
        return row["group"], name, where, model, plan
    hosts = []
    for stage, text in enumerate(re.findall(r"stage\d+: ([^;(]*)", row["hardware"])):
        kinds = re.findall(r"([\w-]+) x(\d+)", text)
        for i, (kind, _) in enumerate(kinds):
            hosts.append(
                {
                    "name": f"{kind} {stage}.{i}",
                    "devices": tp * dp // len(kinds),
                    "device": kind,
                    "fabric": "10GB/s",
                    "memory": "256GB",
                    "memory_rate": "100GB/s",
                    "nics": [{"kind": "ethernet", "rate": "100Mbit/s"}],
                }
            )
    return row["group"], name, make_cluster({"name": "mixed", "hosts": hosts}), model, plan


def _offload(row: dict[str, Any]) -> RunParts:
    """Convert a row of DeepSpeed with the optimizer's state in host memory, where the processors
    update it.
    """
    # ZenFlow updates in every fourth step (its default), while the next steps run. A run without
    # offload is plain ZeRO. The report does not print the length of the samples; 1024 is assumed.
    how = row["parallelism"]
    n, late, to = row["n_gpus"], is_yes(how.get("zenflow")), offloads(how)
    if to is None or to not in ("", "cpu"):
        raise ConfigError(
            f"run {row['id']} offloads its state to {to or 'an unknown place'}, not to cpu",
            hint="set the offload field to cpu or to none",
        )
    plain = {0: "ddp", 1: "zero1", 2: "zero1", 3: "zero3"}.get(how.get("zero", 0), "")
    plan = Plan(
        placement("zero-offload" if to else plain),
        Parallelism(dp=n),
        row["batch"]["local"],
        staleness=int(late),
        activation_checkpointing=True,
    )
    where = cluster(n, n, "A100-40GB", "230GB/s", "")
    rate = parse_rate(fitted("deepspeed-offload")["updates"]) * (4 if late else 1)
    host = where.hosts[0].model_copy(update={"updates": rate})
    model = shape(named(row["model"]).name, seq_len=1024)
    return row["group"], model.name, where.model_copy(update={"hosts": (host,)}), model, plan


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in {text}"
    return found[1]


_FAMILIES = {
    "vtrain-multi": _vtrain,
    "vtrain-single": _vtrain,
    "llm-foundry-fsdp": _foundry,
    "torchtitan-h100": _titan,
    "torchtitan-a100": _titan,
    "simumax-b200": _simumax,
    "megatron-bridge": _bridge,
    "sailor-gh200": _sailor,
    "sailor-hetero": _sailor,
    "deepspeed-offload": _offload,
}
