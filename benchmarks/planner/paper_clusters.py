"""Clusters and plans for the set-ups of five papers, for `roadtrain reproduce`. Fitted values are
in fitted.toml. Values that a paper does not print are chosen in this file, with a comment.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import BlockShape, ModelShape, Transformer
from roadtrain.config.plan_file import (
    ElementBytes,
    Framework,
    Plan,
    PlanMemory,
    SwitchPackets,
    placement,
)
from roadtrain.stages.parallelism import Parallelism


@cache
def fitted(name: str) -> dict[str, Any]:
    tree = tomllib.loads(files("roadtrain.config").joinpath("fitted.toml").read_text())
    return dict(tree[name])


def gpt(
    layers: int, hidden: int, heads: int, *, vocab: int = 51200, seq_len: int = 2048, **more: Any
) -> ModelShape:
    """Build the shape of a GPT with as many parameters as Megatron's. `more`: further arguments of
    Transformer.
    """
    own = Transformer(layers, hidden, heads, vocab, seq_len, positions=seq_len, **more)
    return own.shape(f"GPT-{layers}x{hidden}")


# LuWu: 8 workers with one A100, an optimizer node with 12 SSDs, a switch that sums and multicasts


def luwu(ssds: int = 12, workers: int = 8) -> Cluster:
    """Describe LuWu's testbed."""
    # The paper prints 26 GB/s in each direction for reads and writes that are mixed 1:1. The data
    # sheet of an SSD has 6.5 GB/s for reads and 3.4 GB/s for writes. If reads and writes share the
    # time (`mixed` = 1), 12 SSDs give 26.8 GB/s, which agrees with the paper. The workers of the
    # baselines have 16 SSDs with the slower PCIe 3.0, which reach the printed rate too.

    def ssd(n: int, read: str, write: str) -> list[dict[str, Any]]:
        return [{"count": n, "read": read, "write": write, "mixed": 1, "capacity": "3.84TB"}]

    own = fitted("luwu-nccl")
    nics = [{"kind": "roce", "rate": "12GB/s"}]
    return make_cluster(
        {
            "name": "LuWu",
            "switches": [{"name": "roce", "sums": True, "multicasts": True}],
            "hosts": [
                {
                    "name": "worker",
                    "count": workers,
                    "device": "A100-40GB",
                    "memory": "256GB",
                    "memory_rate": "150GB/s",
                    "updates": own["updates"],
                    "uplink": "26GB/s",
                    "ssds": ssd(2, "3.25GB/s", "3.25GB/s"),
                    "nics": nics,
                },
                {
                    "name": "optimizer",
                    "memory": "256GB",
                    "memory_rate": "250GB/s",
                    "updates": "150GB/s",
                    "uplink": "78GB/s",
                    "ssds": ssd(ssds, "6.5GB/s", "3.4GB/s"),
                    "nics": nics,
                },
            ],
        }
    )


# Width, header, window and scales are not printed (L13). The printed times need 16 bits an element;
# the other overhead of packets is part of the fitted share of a card's rate.
PRINTED_PACKETS = SwitchPackets("int16", window=1 << 30, overhead=0, block=0)


def luwu_plan(which: str, model: ModelShape, micro_batch: int, workers: int = 8) -> Plan:
    """Build the plan of LuWu or of one of the systems that the paper compares with LuWu. For
    SwitchML, which trains in fp32, call `wide` on the model first.
    """
    # According to the paper, LuWu and ZeRO-Infinity offload activations to the host. `host_bytes`
    # is 8 bytes a parameter, for the 16- and 32-bit gradients and the pinned buffers of
    # ZeRO-Infinity. With this value, 175B is the largest model that fits 256 GB. `logit_bytes` is
    # for the loss of OPT in Hugging Face's transformers. This loss stores the logits, a shifted
    # copy, the log-softmax of the copy, and the gradients of logits and copy. According to the
    # paper, SwitchML trains in fp32; PyTorch 1.9.1 then computes matrix products in TF32. The
    # buffers of SwitchML's DistributedDataParallel hold a second copy of all gradients.
    base = Plan(
        placement("optimizer-node"),
        Parallelism(dp=workers),
        micro_batch,
        activation_checkpointing=True,
        memory=PlanMemory(root=False),
        framework=Framework(logit_bytes=10),
        packets=PRINTED_PACKETS,
    )
    if which == "luwu":
        return base.changed(update_at="gradient", buffers=16, slots=2, offload=True, in_turn=True)
    if which == "zero-infinity":
        return base.changed(
            placement=placement(which), buffers=1, slots=2, offload=True, host_bytes=8
        )
    if which == "zero3":
        return base.changed(placement=placement(which), slots=3)
    return base.changed(
        placement=placement("switch-sum"),
        root=True,
        gradient_bytes=4,
        parameter_bytes=4,
        state_bytes=8,
        overlap=False,
        precision="tf32",
        logit_bytes=20,
        context_bytes=1e9 + 4 * model.params,
        wire="int32",
    )


def wide(model: ModelShape) -> ModelShape:
    """Return the same model with fp32 activations."""
    blocks = tuple(
        replace(block, saved=2 * block.saved, input=2 * block.input) for block in model.blocks
    )
    return replace(model, blocks=blocks)


# Smart-Infinity: one host, 1 to 10 SSDs with a processor each


def smart_infinity(ssds: int, device: str = "RTX-A5000") -> Cluster:
    own = fitted("smart-infinity")
    ssd = {
        "count": ssds,
        "read": own["read"],
        "write": own["write"],
        "capacity": "4TB",
        "internal": own["internal"],
        "updates": own["updates"],
    }
    return make_cluster(
        {
            "name": "Smart-Infinity",
            "hosts": [
                {
                    "name": "host",
                    "device": device,
                    "memory": "1024GB",
                    "memory_rate": "150GB/s",
                    "updates": "90GB/s",
                    "uplink": own["uplink"],
                    "ssds": [ssd],
                }
            ],
        }
    )


def smart_infinity_plan(which: str) -> Plan:
    """Build the plan of a variant of Smart-Infinity. `base`: ZeRO-Infinity on RAID0; `su`:
    SmartUpdate; `suo`: SmartUpdate with its transfer handler; `suoc`: `suo` that transfers only 2 %
    of a gradient's bytes.
    """
    base = Plan(
        placement("raid0"),
        micro_batch=4,
        activation_checkpointing=True,
        memory=PlanMemory(file_slots=1, buffers=2, slots=2, root=False),
        sizes=ElementBytes(upstream_bytes=4),
    )
    near = base.changed(placement=placement("near-storage"), buffers=1)
    return {
        "base": base,
        "su": near,
        "suo": near.changed(buffers=2),
        "suoc": near.changed(buffers=2, keep=0.01),
    }[which]


# Holmes: hosts with 8 A100, InfiniBand or RoCE inside a cluster, Ethernet between


def holmes(kind: str, nodes: int) -> Cluster:
    own = fitted("holmes")

    def host(name: str, count: int, card: str) -> dict[str, Any]:
        cards = [{"kind": kind, "rate": own[kind]} for kind in dict.fromkeys(("ethernet", card))]
        return {
            "name": name,
            "count": count,
            "devices": 8,
            "device": "A100-80GB",
            "fabric": "230GB/s",
            "memory": "1TB",
            "memory_rate": "200GB/s",
            "nics": cards,
        }

    if kind == "Hybrid":
        hosts = [host("first", nodes // 2, "infiniband"), host("second", nodes // 2, "roce")]
    else:
        hosts = [host("first", nodes, kind.lower())]
    return make_cluster({"name": "Holmes", "hosts": hosts})


def holmes_plan(batch: int, nodes: int, kind: str, micro_batch: int = 8) -> Plan:
    """Build a plan for Holmes with two pipeline stages and a micro-batch that the paper does not
    print.
    """
    # The paper prints three stages, but 3 divides neither 32 nor 64 devices. A ring reduce-scatters
    # gradients in fp32 and gathers parameters in 16 bits. The plan has the average of 4 and 2 bytes
    # an element for both directions of this exchange.
    dp = nodes * 8 // 2
    return Plan(
        placement("ddp"),
        Parallelism(dp=dp, pp=2),
        micro_batch,
        batch // dp // micro_batch,
        activation_checkpointing=True,
        overlap=False,
        networks={"pp": "ethernet"} if kind == "Hybrid" else {},
        sizes=ElementBytes(gradient_bytes=3),
    )


# SGC: one V100 a node, a card that computes, 100 Gbit/s


def sgc(nodes: int) -> Cluster:
    """Describe SGC's testbed, with memory sizes that the paper does not print."""
    # 32 GB for a device, as a V100 has. The memory of a host holds the whole model, because
    # buffering needs this.
    own = fitted("sgc")
    return make_cluster(
        {
            "name": "SGC",
            "hosts": [
                {
                    "name": "node",
                    "count": nodes,
                    "devices": 1,
                    "memory": "8TB",
                    "memory_rate": "120GB/s",
                    "updates": own["updates"],
                    "nics": [{"kind": "roce", "rate": "100Gbit/s", "relay": True}],
                    "device": {
                        "kind": "V100",
                        "flops": "125TFLOP/s",
                        "memory": "32GiB",
                        "memory_rate": "900GB/s",
                        "copy": "16GB/s",
                    },
                }
            ],
        }
    )


def sgc_plan(which: str, nodes: int) -> Plan:
    """Build the plan of a variant of SGC. `gpu`: everything, including activations, is on the
    devices (FSDP). `base`: the processors update. `sgc`: network cards prefetch and buffer. The
    updates of `base` and `sgc` are one step late. The batch size is fitted.
    """
    own, parallelism = fitted("sgc"), Parallelism(dp=nodes)
    if which == "gpu":
        return Plan(
            placement("zero3"), parallelism, own["batch"], memory=PlanMemory(slots=2, root=False)
        )
    base = Plan(
        placement("zero-offload"),
        parallelism,
        own["batch"],
        activation_checkpointing=True,
        staleness=1,
        memory=PlanMemory(slots=2, root=False, offload=True),
    )
    if which == "base":
        return base
    return base.changed(placement=placement("smartnic"), slots=3, kept=1000)


# BytePS: 32 hosts with 8 V100 and up to 32 hosts without devices, 100 Gbit/s


def byteps(hosts: int, spares: int, devices: int = 8, rate: str = "100Gbit/s") -> Cluster:
    def host(name: str, count: int, more: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name,
            "count": count,
            "memory": "512GB",
            "memory_rate": "128GB/s",
            "sums": "50GB/s",
            "nics": [{"kind": "roce", "rate": rate}],
            **more,
        }

    kinds = [
        host(
            "gpu",
            hosts,
            {"devices": devices, "device": "V100-32GB", "fabric": "130GB/s", "price_per_hour": 25},
        )
    ]
    kinds += [host("spare", spares, {"price_per_hour": 4.2})] if spares else []
    return make_cluster({"name": "BytePS", "hosts": kinds})


def byteps_plan(name: str, hosts: int, devices: int, batch: int) -> Plan:
    """Build a data-parallel plan for BytePS with fp32 gradients. `name`: name of the placement."""
    return Plan(
        placement(name),
        Parallelism(dp=hosts * devices),
        batch,
        sizes=ElementBytes(gradient_bytes=4, parameter_bytes=4, state_bytes=4),
    )


def lump(params: float, flops: float = 0.0, blocks: int = 1) -> ModelShape:
    """Build the shape of a model with `params` parameters and `flops` FLOPs, in equal blocks."""
    own = BlockShape("layer", int(params / blocks), flops / blocks, 0.0, 0.0)
    return ModelShape("lump", own.times(blocks), 1)
