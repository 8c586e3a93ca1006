"""Splits of a memory budget: none exceeds the budget (Rule 4), and the minimum named in an error
suffices."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.chunks import SEGMENT, ChunkTable, ParamSpec, record
from roadtrain.errors import BudgetError
from roadtrain.options.budgets import HUGE, BudgetTerms, derive
from roadtrain.servers.protocol.assignment import assign
from roadtrain.units import GIB, MIB, parse_bytes, round_up

ARRAYS, SCALARS = 2, 1


@st.composite
def jobs(draw):
    """Draw (table, records, owners, options of derive): models of a few MB, with and without the
    twin buffers of compression."""
    dtype = draw(st.sampled_from(["fp32", "bf16"]))
    blocks = []
    for b in range(draw(st.integers(1, 7))):
        sizes = draw(st.lists(st.sampled_from([0, 7, 5000, SEGMENT, 300_000, 1 << 20]), max_size=3))
        trains = draw(st.booleans())
        specs = [
            ParamSpec(f"b{b}.{i}", (n,), dtype, trains, 0 if trains else -1)
            for i, n in enumerate(sizes)
        ]
        blocks.append((f"b{b}", specs))
    residual_blocks, root_residual, n = set(), 0, len(blocks)
    if draw(st.booleans()):
        for i, (name, specs) in enumerate(blocks[:n]):
            mine = [
                ParamSpec(f"residual:{p.name}", p.shape, "fp32", True, 1)
                for p in specs
                if p.trainable and p.numel
            ]
            if mine:
                residual_blocks.add(len(blocks))
                root_residual = len(blocks) if i == 0 else root_residual
                blocks.append((f"residual:{name}", mine))
    table = ChunkTable.build(blocks, draw(st.sampled_from([SEGMENT, 4 * SEGMENT, 16 * SEGMENT])))
    records = {
        c.id: record(c, 0 if c.group else ARRAYS, 0 if c.group else SCALARS) for c in table.chunks
    }
    owners = assign(table, [1.0] * draw(st.integers(1, 5)))
    options = {
        "on_files": draw(st.booleans()),
        "holds_gradients": draw(st.booleans()),
        "residual_blocks": frozenset(residual_blocks),
        "root_residual": root_residual,
    }
    return table, records, owners, options


def least_of(job):
    """Find the smallest budget that fits by bisection, as the reference for the error message."""
    table, records, owners, options = job
    low, high = 0, 64 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        try:
            derive(table, records, owners, BudgetTerms(**options), middle)
            high = middle
        except BudgetError:
            low = middle
    return high


BUDGETS = st.one_of(st.integers(0, 300 * MIB), st.integers(0, 8 * GIB), st.integers(0, 2 * MIB))


@given(jobs(), BUDGETS)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_never_more_than_the_budget(job, budget):
    table, records, owners, options = job
    least = least_of(job)
    try:
        got = derive(table, records, owners, BudgetTerms(**options), budget)
    except BudgetError as error:
        assert budget < least
        named = re.search(r"at least ([\d]+ MiB) .*the budget is ([\d.]+ \w+)", str(error))
        assert named is not None, "both numbers"
        enough = parse_bytes(named[1])
        assert least <= enough < least + MIB
        assert derive(table, records, owners, BudgetTerms(**options), enough).total <= enough
        return
    assert budget >= least
    assert got.total <= budget


@given(jobs(), BUDGETS)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_every_buffer_holds_what_goes_into_it(job, extra):
    table, records, owners, options = job
    got = derive(table, records, owners, BudgetTerms(**options), least_of(job) + extra)
    streamed = [b for b in table.blocks[1:] if b.index != options["root_residual"]]
    assert got.worker.slots >= 2 and got.worker.push_buffers >= 3
    assert all(
        b.pull_nbytes <= got.worker.slot_bytes and b.push_nbytes <= got.worker.push_bytes
        for b in streamed
    )
    root = table.blocks[0]
    permanent = root.pull_nbytes + 2 * root.push_nbytes
    permanent += (
        table.blocks[options["root_residual"]].pull_nbytes if options["root_residual"] else 0
    )
    assert permanent <= got.worker.root_bytes
    assert got.worker.activation_bytes >= 8 * HUGE
    if options["on_files"]:
        servers = max(owners, default=0) + 1
        assert got.records.buffers % servers == 0 and got.records.buffers // servers >= 2
        assert all(r.nbytes <= got.records.buffer_bytes for r in records.values())
        assert all(
            round_up(c.weights_nbytes, 4096) <= got.records.scratch_bytes for c in table.trainable
        )
        assert not got.records.resident & got.records.weights_resident
        kept = sum(records[c].nbytes for c in got.records.resident) + sum(
            records[c].weights_nbytes for c in got.records.weights_resident
        )
        assert kept <= got.records.resident_bytes
    else:
        assert got.records.resident == frozenset(records)
        assert sum(r.nbytes for r in records.values()) <= got.records.resident_bytes
        if options["holds_gradients"]:  # waiting gradients cannot be sent
            assert got.worker.push_buffers >= 2 + len(streamed)


@given(jobs())
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_more_memory_never_means_less_of_anything_needed(job):
    table, records, owners, options = job
    least = least_of(job)
    small, large = (
        derive(table, records, owners, BudgetTerms(**options), n) for n in (least, least + 4 * GIB)
    )
    assert (
        small.worker.slots <= large.worker.slots
        and small.worker.push_buffers <= large.worker.push_buffers
    )
    assert (
        small.records.buffers <= large.records.buffers
        and small.worker.activation_bytes <= large.worker.activation_bytes
    )
    assert small.records.resident <= large.records.resident
    if options["on_files"]:
        assert large.records.resident == frozenset(c.id for c in table.trainable)
        assert large.records.resident | large.records.weights_resident == frozenset(records)


@given(jobs(), BUDGETS, BUDGETS)
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_memory_of_the_device_is_bounded_too(job, extra, device_bytes):  # Rule 4
    """It does not depend on the host's memory."""
    table, records, owners, options = job
    host = least_of(job) + extra
    free = derive(table, records, owners, BudgetTerms(**options), host)
    assert free.worker.device is None
    enough = device_bytes
    try:
        derive(table, records, owners, BudgetTerms(**options), host, device_bytes)
    except BudgetError as error:
        named = re.search(r"at least (\d+ MiB) of device memory.*the budget is", str(error))
        assert named is not None, "both numbers"
        enough = parse_bytes(named[1])
        assert device_bytes < enough
    got = derive(table, records, owners, BudgetTerms(**options), host, enough)
    device = got.worker.device
    assert replace(got.worker, device=None) == free.worker
    assert device.total <= enough and device.slots in (2, 3)
    assert device.root_bytes >= table.blocks[0].pull_nbytes + table.blocks[0].push_nbytes
    for block in table.blocks[1:]:
        if block.index not in options["residual_blocks"]:
            assert block.pull_nbytes <= device.slot_bytes
            assert block.push_nbytes <= min(device.gradient_bytes, device.autograd_bytes)


def test_the_refusal_names_the_largest_block_and_a_way_out():
    specs = [ParamSpec("w", (1 << 20,), "fp32", True, 0)]
    table = ChunkTable.build([("root", []), ("small", []), ("large", specs)])
    records = {c.id: record(c, ARRAYS, SCALARS) for c in table.chunks}
    with pytest.raises(
        BudgetError, match=r"(?s)the budget is 1.0 MiB.*'large'.*at least .* chunks smaller"
    ) as caught:
        derive(table, records, (0,), BudgetTerms(on_files=True, holds_gradients=True), MIB)
    assert parse_bytes(re.findall(r"needs at least (\d+ MiB)", str(caught.value))[0]) > MIB
    with pytest.raises(BudgetError, match="keep the state on files"):
        derive(table, records, (0,), BudgetTerms(on_files=False, holds_gradients=True), MIB)


def test_blocks_are_kept_until_backward_as_configured():
    blocks = [(f"b{i}", [ParamSpec(f"b{i}.w", (1 << 20,), "fp32", True, 0)]) for i in range(9)]
    table = ChunkTable.build(blocks, 1 << 20)
    words = {"on_files": True, "holds_gradients": True, "serves": False}

    def slots(nbytes, **more):
        got = derive(table, {}, (0,) * len(table.chunks), BudgetTerms(**words, **more), nbytes)
        assert got.total <= nbytes
        return got.worker.slots, got.worker.kept

    assert slots(2 * GIB) == slots(2 * GIB, buffering="all") and slots(2 * GIB)[1] == 8
    assert slots(2 * GIB, buffering="none")[1] == 0 and slots(2 * GIB, buffering="none")[0] < 8
    few = 80 * MIB
    assert 0 <= slots(few)[1] < 8
    with pytest.raises(
        BudgetError, match=rf"8 blocks of 4.0 MiB .*only {slots(few)[0]} fit .*80.0 MiB"
    ):
        slots(few, buffering="all")
