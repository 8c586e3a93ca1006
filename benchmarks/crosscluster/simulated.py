"""Simulate a run of `crosscluster` from its plan, its cluster and the measured costs of the lab's
hosts. Does NOT start processes.

For a throttled cluster, the measured seconds are divided by the fraction of processors that its
hosts still have.
"""

from __future__ import annotations

from typing import Any, Literal

from benchmarks.crosscluster.costs import HostCosts
from benchmarks.crosscluster.lab import CPUS, ETHERNET, INFINIBAND, ROCE
from benchmarks.crosscluster.model import RunSpec
from benchmarks.crosscluster.runs import Run
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import ModelShape, from_config
from roadtrain.config.plan_file import ElementBytes, NetworkGroup, Plan, placement
from roadtrain.errors import ConfigError
from roadtrain.lab import CARRIED
from roadtrain.simulator.compute import Constants, HostTimes
from roadtrain.simulator.fabric import UPDATE_BYTES
from roadtrain.simulator.run import Result, simulate
from roadtrain.stages.parallelism import Parallelism

FP32 = ElementBytes(parameter_bytes=4, gradient_bytes=4, activation_bytes=4)
KINDS = {"ib": ("infiniband", INFINIBAND), "roce": ("roce", ROCE)}
LATENCY = "50us"
Networks = dict[NetworkGroup, Literal["ethernet"]]


def predicted(run: Run, costs: HostCosts) -> Result:
    """Simulate one step of a run, with every rank by itself."""
    model = shape_of(run.spec)
    return simulate(
        plan_of(run),
        cluster_of(run, costs),
        model,
        constants_of(run, costs),
        checked=False,
        apart=True,
    )


def shape_of(spec: RunSpec) -> ModelShape:
    size = spec.model
    config = {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "vocab_size": size.vocabulary,
    }
    return from_config(config, seq_len=spec.batch.sequence)


def plan_of(run: Run) -> Plan:
    """Build the plan of a run. Raises ConfigError if stages of the run have a store."""
    spec, batch = run.spec, run.spec.batch
    if spec.stage_stores:
        raise ConfigError(
            f"{run.case}: the simulation does not support stages with a store of their own"
        )
    networks: Networks = {} if run.environment.fast else {"dp": "ethernet", "pp": "ethernet"}
    if spec.method == "ddp":  # each rank computes its rows in one pass
        whole = Parallelism(dp=4)
        return Plan(
            placement("ddp"), whole, batch.rows // 4, networks={"dp": "ethernet"}, sizes=FP32
        )
    fields = dict(spec.parallelism)
    # micro-batches of each replica; of all together where widths differ
    many = batch.microbatches // (1 if "widths" in fields else fields.get("dp", 1))
    stages = fields.pop("stages", None) or run.measured.results[0]["stages"]
    tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    parallelism = Parallelism(**{**fields, **tuples}, stages=tuple(stages))
    if spec.method == "torch_pipeline":  # sums gradients after all backwards
        return Plan(
            placement("ddp"),
            parallelism,
            batch.micro_rows,
            many,
            overlap=False,
            networks={"dp": "ethernet", "pp": "ethernet"},
            sizes=FP32,
        )
    return Plan(
        placement("zero1"),
        parallelism,
        batch.micro_rows,
        many,
        overlap=spec.overlap,
        gather="forward" if spec.overlap else "update",
        networks=networks,
        sizes=FP32,
    )


def cluster_of(run: Run, costs: HostCosts) -> Cluster:
    """Describe the run's two clusters of two hosts, with the NICs that the run used."""

    def hosts(name: str, number: int) -> dict[str, Any]:
        nics = [{"kind": "ethernet", "rate": rate(ETHERNET), "latency": LATENCY}]
        if run.environment.fast is not None:
            kind, fast = KINDS[run.environment.fast[number]]
            nics.append({"kind": kind, "rate": rate(fast), "latency": LATENCY})
        return {
            "name": name,
            "count": 2,
            "devices": 1,
            "device": {
                "kind": "cpu",
                "flops": "1TFLOP/s",
                "memory": "24GB",
                "memory_rate": "20GB/s",
                "copy": "10GB/s",
            },
            "memory": "24GB",
            "memory_rate": "20GB/s",
            "updates": rate(UPDATE_BYTES / costs.update * run.cpus[number] / CPUS),
            "nics": nics,
        }

    return make_cluster({"hosts": [hosts("a", 0), hosts("b", 1)]})


def rate(nbytes: float) -> str:
    return f"{nbytes:.0f}B/s"


def constants_of(run: Run, costs: HostCosts) -> Constants:
    def times(cpus: float) -> HostTimes:
        slower = CPUS / cpus
        rows = {("layer", rows): seconds * slower for rows, seconds in costs.layer.items()}
        rows |= {("output", rows): seconds * slower for rows, seconds in costs.ends.items()}
        rows |= {("embedding", rows): 0.0 for rows in costs.ends}
        return HostTimes(rows, costs.touch * slower)

    return Constants(
        network=CARRIED,
        backward=costs.backward,
        hosts={name: times(run.cpus[i]) for i, name in enumerate("ab")},
        source="two hosts of the lab that do nothing else",
    )
