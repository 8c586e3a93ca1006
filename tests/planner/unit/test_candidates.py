"""The plans to try beside all that a brute force finds, and the counts of those that are left out."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.paper_clusters import gpt
from roadtrain.config.cluster import Cluster, make_cluster
from roadtrain.config.models import shape
from roadtrain.config.plan_file import placement
from roadtrain.planner.arrangements import arrangements
from roadtrain.planner.candidates import (
    LONG,
    MOST_APART,
    MOST_PARTS,
    MOST_PP,
    batches,
    candidates,
    most_samples,
    nearest_batches,
)
from roadtrain.stages.parallelism import Parallelism


def powers(most: int) -> list[int]:
    return [1 << i for i in range(20) if 1 << i <= max(1, most)]


def cluster_of(hosts: int, devices: int, *more: dict) -> Cluster:
    host = {
        "name": "gpu",
        "count": hosts,
        "devices": devices,
        "device": "A100-80GB",
        "memory": "256GB",
        "nics": [{"rate": "100Gbit/s"}],
    }
    return make_cluster({"hosts": [host, *({**host, **other} for other in more)]})


def split_of(plan) -> tuple[int, ...]:
    p = plan.parallelism
    return p.dp, p.tp, p.pp, p.cp, p.ep, p.virtual_stages


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([(1, 8), (4, 6), (8, 4), (6, 16)]),
    st.sampled_from([512, LONG, 2 * LONG]),
    st.integers(1, 64),
)
def test_candidates_are_all_divisions_of_devices_layers_and_batch(
    hosts: int, devices: int, layers_and_heads: tuple[int, int], tokens: int, batch: int
) -> None:
    layers, heads = layers_and_heads
    model = gpt(layers, 64 * heads, heads, vocab=32000, seq_len=tokens)
    cluster, total = cluster_of(hosts, devices), hosts * devices
    expected, left_out = set(), Counter[str]()
    for tp in (n for n in powers(devices) if devices % n == 0):
        if tp > 1 and heads % tp:
            left_out["heads"] += 1
            continue
        for pp in (n for n in range(1, total // tp + 1) if total // tp % n == 0):
            if pp > min(MOST_PP, layers):
                left_out["pipeline stages"] += 1
                continue
            ranks = total // tp // pp
            for cp in powers(tokens // LONG):
                if ranks % cp:
                    left_out["context/expert"] += 1
                    continue
                dp = ranks // cp
                for parts in (1, *(MOST_PARTS if pp > 1 else ())):
                    if layers % (pp * parts) and parts > 1:
                        left_out["interleaved stages"] += 1
                        continue
                    found = {
                        (dp, tp, pp, cp, 1, parts, size, batch // (dp * size))
                        for size in powers(64)
                        if batch % (dp * size) == 0
                        and (parts == 1 or batch // (dp * size) % pp == 0)
                    }
                    expected |= found
                    left_out["batch"] += not found
    found, why = set(), dict[str, int]()
    for plan in candidates(
        cluster,
        model,
        batch=batch,
        placements=["ddp"],
        left_out=lambda name, reason, many: why.update({reason: many}),
    ):
        assert plan.samples == batch and plan.parallelism.devices == total
        found.add((*split_of(plan), plan.micro_batch, plan.num_microbatches))
    assert found == expected
    kinds = Counter[str]()
    for reason, many in why.items():
        (kind,) = (
            k
            for k in ("heads", "context/expert", "batch", "interleaved stages", "pipeline stages")
            if reason.startswith(k) or (k in reason and not reason.startswith("batch"))
        )
        kinds[kind] += many
    assert kinds == +left_out


def test_experts_are_spread_up_to_their_number_and_only_where_there_are_some() -> None:
    found = {}
    for name in ("Mixtral-8x7B", "LLaMA-7B"):
        model = shape(name)
        plans = candidates(cluster_of(2, 8), model, batch=64, placements=["ddp"])
        found[name] = {plan.parallelism.ep for plan in plans}
    assert found == {"Mixtral-8x7B": {1, 2, 4, 8}, "LLaMA-7B": {1}}


@given(st.integers(1, 1000), st.integers(1, 100))
def test_the_nearest_batches_enclose_a_batch(batch: int, unit: int) -> None:
    numbers = [int(word) for word in nearest_batches(batch, unit).split(" or ")]
    below = list(range(unit, batch + 1, unit))[-1:]
    assert numbers == [*below, (batch // unit + 1) * unit]


def test_rows_have_larger_micro_batches_than_sequences() -> None:
    assert most_samples(gpt(1, 64, 1, vocab=100, seq_len=512)) == 64
    assert most_samples(shape("ResNet-50")) == 4096 == most_samples(shape("DLRM-Kaggle"))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("widths", [(), (1, 3), (2, 1)])
def test_micro_batches_fill_every_replica_and_every_turn(parts, widths) -> None:
    ranks = Parallelism(
        dp=1 if widths else 2, pp=2, widths=widths, virtual_stages=1 if widths else parts
    )
    for batch in range(1, 130):
        found = set(batches(ranks, batch, 8))
        widest = max(widths, default=1)
        assert found == {
            (size, n)
            for size, n in product((1, 2, 4, 8), range(1, 131))
            if ranks.dp * size * n == batch
            and (ranks.virtual_stages == 1 or n % 2 == 0)
            and n >= widest
            and (not widths or n <= 16 * 2 * widest)
        }


def test_stages_of_unequal_width_are_tried_on_few_devices_between_switches() -> None:
    model = gpt(4, 1024, 16, vocab=32000, seq_len=512)

    def widths(devices: int) -> tuple[set[tuple[int, ...]], list[str]]:
        host = {"devices": devices, "device": "A100-80GB", "memory": "256GB"}
        far = make_cluster(
            {
                "hosts": [
                    host
                    | {
                        "name": f"h{i}",
                        "count": i,
                        "nics": [{"rate": "10Gbit/s", "switch": f"s{i}"}],
                    }
                    for i in (1, 2)
                ],
                "switches": [{"name": "s1"}, {"name": "s2"}],
            }
        )
        why: list[str] = []
        plans = candidates(
            far, model, placements=["ddp"], left_out=lambda name, reason, many: why.append(reason)
        )
        return {plan.parallelism.widths for plan in plans} - {()}, why

    found, why = widths(1)
    assert found and not any("unequal width" in reason for reason in why)
    found, why = widths(8)
    assert not found and any(
        f"at most {MOST_APART} devices" in reason and "24" in reason for reason in why
    )


def test_options_are_tried_where_a_placement_has_some() -> None:
    model = gpt(2, 1024, 16, vocab=32000, seq_len=512)
    tried = {}
    for name in ("ddp", "zero1", "zero3", "raid0", "smartnic", "optimizer-node"):
        plans = list(candidates(cluster_of(1, 1), model, batch=1, placements=[name]))
        assert {plan.placement for plan in plans} == {placement(name)}
        assert (
            len(plans) == len(set(plans)) and len(plans) % 2 == 0
        )  # with checkpoints, and without
        tried[name] = len(plans) // 2
        if name == "zero1":
            assert all(plan.changed(gradient_bytes=4, gather="forward") == plan for plan in plans)
        if name == "smartnic":
            assert sum(plan.changed(kept=1000) == plan for plan in plans) == len(plans) // 2
    assert tried["ddp"] == tried["zero1"] == tried["zero3"] == 1 and tried["smartnic"] == 2
    assert tried["optimizer-node"] > 1


def test_an_arrangement_names_its_hosts_in_order_and_those_it_leaves_out() -> None:
    cluster = cluster_of(
        1, 1, {"name": "slow", "nics": [{"rate": "1Gbit/s"}]}, {"name": "big", "memory": "1TB"}
    )
    texts = [arrangement.text for arrangement in arrangements(cluster)]
    assert texts[0] == "hosts in the order gpu, slow, big"
    assert "hosts in the order gpu, big, without slow" in texts
    assert len(texts) == len(set(texts))
