"""parallel/timed_copy.py and what partition.py knows without measuring: a model's blocks are timed
before it is cut, and it stays as it is."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from roadtrain.config.networks import GroupNetwork, HostCard
from roadtrain.config.parallelism import Parallelism
from roadtrain.parallel.block_times import block_memories, measure_blocks
from roadtrain.parallel.cuts import Cuts, Segment
from roadtrain.parallel.groups import Groups
from roadtrain.parallel.partition import known_messages
from roadtrain.parallel.stage_model import MicroBatch
from roadtrain.parallel.timed_copy import sample_of, timed_copy
from roadtrain.protocol.pipeline import BACKWARD, FORWARD

CPU = torch.device("cpu")
BLOCKS = 5
TOKENS = torch.arange(32).reshape(2, 16)
BATCH = MicroBatch((), {"input_ids": TOKENS, "labels": TOKENS})


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=BLOCKS,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("segments", [[Segment(0, 2)], [Segment(2, 4)], [Segment(4, 5)]], ids=str)
def test_a_copy_is_timed_and_the_model_stays(device: str, segments: list[Segment]) -> None:
    with torch.device(device):
        model = llama()
    before = {name: (id(p), p.device, p.shape) for name, p in model.named_parameters()}
    sample = sample_of(segments, BLOCKS)
    stage = timed_copy(model, BATCH, sample, CPU, torch.bfloat16)
    found = measure_blocks(stage, BATCH, lambda out, _: out.loss, least_s=0.02)
    assert found.forward_s > 0 and found.backward_s > 0
    assert (found.before > 0) == (segments[0].begin == 0)
    assert (found.after > 0) == (segments[0].stop == BLOCKS)
    assert list(found.activation_bytes) == [segment.begin for segment in sample]
    params = list(stage.model.parameters())
    assert {p.dtype for p in params} == {torch.bfloat16} and not any(p.is_meta for p in params)
    assert sum(name.startswith("model.layers") for name in stage.names) == 9, "one block's"
    after = {name: (id(p), p.device, p.shape) for name, p in model.named_parameters()}
    assert after == before
    if device == "cpu":
        model(**BATCH.kwargs).loss.backward()  # it runs on


def test_blocks_that_were_not_timed_keep_what_the_others_keep() -> None:
    with torch.device("meta"):
        model = llama()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    cuts = Cuts(model, (), BATCH.kwargs or {})
    stage = timed_copy(model, BATCH, [Segment(2, 3)], CPU)
    times = measure_blocks(stage, BATCH, lambda out, _: out.loss, least_s=0.02)
    blocks, _ = block_memories(cuts, sizes, [times])
    assert {one.activation_bytes for one in blocks} == {times.activation_bytes[2]}
    assert times.activation_bytes[2] > TOKENS.numel() * 32 * 4


def test_what_stands_for_segments() -> None:
    assert sample_of([Segment(0, 3)], 8) == [Segment(0, 1)]
    assert sample_of([Segment(3, 6)], 8) == [Segment(3, 4)]
    assert sample_of([Segment(3, 8)], 8) == [Segment(7, 8)]
    assert sample_of([Segment(0, 2), Segment(6, 8)], 8) == [Segment(0, 1), Segment(7, 8)]
    assert sample_of([Segment(0, 2)], 2) == [Segment(0, 2)]
    assert sample_of([Segment(0, 1)], 1) == [Segment(0, 1)]


def test_messages_over_networks_of_known_rates() -> None:
    """Two ranks of host a0 share its card; b0 has one rank. What nobody knows is left out."""
    groups = Groups.of(
        Parallelism(pp=3, widths=(2, 1, 1)), [("a0", "a", 2), ("b0", "b", 1), ("c0", "c", 1)]
    )
    networks = {}
    for number, group in enumerate(groups.boundaries):
        rate = 1e7 if number <= 1 else 0.0
        cards = tuple(
            HostCard("eth0", f"10.0.0.{rank}", 24, bytes_per_s=rate) for rank in group.ranks
        )
        hosts = tuple(map(groups.host, group.ranks))
        networks[group.name] = GroupNetwork(group.name, group.ranks, hosts, "ethernet", cards)
    assert known_messages(groups, networks, 1_000_000) == {(0, FORWARD): 0.2, (0, BACKWARD): 0.1}
