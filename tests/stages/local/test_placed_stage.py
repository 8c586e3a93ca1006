"""A placed model as a stage's optimizer, compared with plain torch on all micro-batches: sums over the
stage's ranks, several forwards in flight, and state that moves."""

import functools
import math
import os
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn import functional

import roadtrain
from roadtrain import Files, Memory, Servers
from roadtrain.chunks import ParamSpec
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import LoopError, PeerError, RoadtrainError
from roadtrain.stages.control_links import RankPlace
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.stages.data_group import SharedCopies
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.piece_exchange import exchange
from roadtrain.stages.pieces import VALUE, Extent, Piece
from roadtrain.stages.placed_stage import PlacedStage, for_mean
from roadtrain.stages.stage_model import MicroBatch, StageModel
from tests.support import pipeline_job, world
from tests.support.models import VOCAB, Net
from tests.support.pipeline_job import PipelineSpec
from tests.support.state_pieces import control_links

MICROS = 4


def build(tied=False, frozen=False):
    torch.manual_seed(3)
    model = Net(depth=2, width=32, dropout=0.0, tied=tied, frozen=frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def micro(step, number):
    torch.manual_seed(1000 * step + number)
    return torch.randint(VOCAB, (2, 8)), torch.randint(VOCAB, (2, 8))


def loss_of(model, step, number):
    x, y = micro(step, number)
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / MICROS


def staged(store, tied=False, frozen=False, group=None, **options):
    model, optimizer = build(tied, frozen)
    placed = roadtrain.place(
        model,
        optimizer,
        store=store,
        host_budget="200MiB",
        group=group or WorkerIdentity(),
        chunk_elements=1 << 16,
        report=lambda line: None,
        **options,
    )
    return model, placed


def sum_over_ranks(value):
    """Return the sum of a value over the ranks of the job, if there are several."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def stage_step(model, stage, step, numbers=range(MICROS), clip=None):
    """Run all forwards before the first backward; return the sum of the losses and the norm."""
    stage.begin_step(len(numbers))
    losses = [loss_of(model, step, number) for number in numbers]
    for loss in losses:
        loss.backward()
    norm = math.sqrt(sum_over_ranks(stage.sum_squares())) if clip else None
    stage.step(min(1.0, clip / norm) if clip else 1.0)
    return sum(float(loss.detach()) for loss in losses), norm


def plain_steps(steps, clip=None, tied=False):
    model, optimizer = build(tied)
    out = []
    for step in range(steps):
        total = 0.0
        for number in range(MICROS):
            loss = loss_of(model, step, number)
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)) if clip else None
        optimizer.step()
        optimizer.zero_grad()
        out.append((total, norm))
    return out, model


def assert_near(steps, expected):
    for (loss, norm), (plain, plain_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(plain, rel=1e-5)
        assert norm == plain_norm or norm == pytest.approx(plain_norm, rel=1e-4)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("on", ["memory", "files"])
def test_a_stage_trains_as_plain_torch_with_forwards_before_backwards(on, clip, tmp_path):
    model, placed = staged(Memory() if on == "memory" else Files(tmp_path / "store"))
    with placed:
        stage = PlacedStage(placed)
        found = [stage_step(model, stage, step, clip=clip) for step in range(4)]
        assert stage.steps_done == 4
    assert_near(found, plain_steps(4, clip)[0])


def state_of(stage):
    """Return all pieces of a stage, cut into small ones."""
    pieces = []
    for extent in stage.extents():
        for start in range(extent.start, extent.stop, 1500):
            pieces.append(stage.piece(Extent(extent.name, start, min(start + 1500, extent.stop))))
    return pieces


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("source", "target"), [("memory", "files"), ("files", "memory")])
def test_state_moves_to_another_placement(source, target, frozen, tmp_path):
    stores = {"memory": Memory(), "files": Files(tmp_path / "store")}
    model, placed = staged(stores[source], frozen=frozen)
    with placed:
        stage = PlacedStage(placed)
        for step in range(2):
            stage_step(model, stage, step)
        pieces = state_of(stage)
        expected = [stage_step(model, stage, step) for step in (2, 3)]
    assert {key for piece in pieces for key in piece.arrays} == {VALUE, "exp_avg", "exp_avg_sq"}
    model, placed = staged(stores[target], frozen=frozen)
    with placed:
        stage = PlacedStage(placed)
        assert [e.name for e in stage.needed()] == [e.name for e in stage.extents()]
        stage.load(iter(pieces), 2)
        assert stage.steps_done == 2
        assert [stage_step(model, stage, step) for step in (2, 3)] == expected  # Rule 1


def test_a_store_ahead_is_rewound_and_a_store_at_the_step_is_kept(tmp_path, monkeypatch):
    model, placed = staged(Files(tmp_path / "store"))
    with placed:
        stage = PlacedStage(placed)
        stage_step(model, stage, 0)
        pieces = state_of(stage)
        expected = stage_step(model, stage, 1)
    model, placed = staged(Files(tmp_path / "store"))
    with placed:
        assert placed.steps_done == 2
        stage = PlacedStage(placed)
        stage.load(iter(pieces), 1)
        assert (stage.steps_done, stage_step(model, stage, 1)) == (1, expected)
        now = state_of(stage)
        monkeypatch.setattr(placed, "take_values", None)  # nothing is written
        stage.load(iter(now), 2)


def test_gradients_that_no_update_used_are_refused():
    model, placed = staged(Memory())
    with placed:
        stage = PlacedStage(placed)
        loss_of(model, 0, 0).backward()
        with pytest.raises(LoopError, match="gradients that no update has used"):
            stage.begin_step(1)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 100])
def test_the_division_by_the_number_of_workers_is_undone_exactly(width):
    for i in range(200):
        scale = 1.0 / (1 + 0.37 * i)
        assert for_mean(scale, width) / width in (scale, float(torch.tensor(scale)))
    assert for_mean(1.0, width) / width == 1.0


def in_servers(addresses, rank):
    group = WorkerIdentity.of_environment().of_stage(1, rank, 2)
    return staged(Servers(addresses), group=group, deadline_s=30)


def with_servers(addresses, clip, rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, placed = in_servers(addresses, rank)
    with placed:
        stage = PlacedStage(placed)
        steps = []
        for step in range(3):
            loss, norm = stage_step(model, stage, step, range(rank, MICROS, 2), clip)
            steps.append((loss, norm))
        extents = [(e.name, e.start, e.stop) for e in stage.extents()]
        pieces = state_of(stage)
        values = {(p.extent.name, p.extent.start): p.arrays[VALUE].tolist() for p in pieces}
    return steps, extents, values


@pytest.mark.slow
@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.exhaustive), 0.3])
def test_two_ranks_of_a_stage_share_servers_and_sum(clip, addresses):
    results = world.run(2, functools.partial(with_servers, addresses(2), clip))
    assert all(isinstance(result, tuple) for result in results), results
    expected, plain = plain_steps(3, clip)
    for step in range(3):
        assert sum(result[0][step][0] for result in results) == pytest.approx(
            expected[step][0], rel=1e-5
        )
    shapes = dict(plain.named_parameters())
    covered = dict.fromkeys(shapes, 0)
    for _, extents, values in results:
        for name, start, stop in extents:
            covered[name] += stop - start
        for (name, start), numbers in values.items():
            if "in_proj_bias" in name:
                continue  # gradients of the keys' biases are only rounding errors
            own = shapes[name].detach().reshape(-1)[start : start + len(numbers)]
            torch.testing.assert_close(torch.tensor(numbers), own, rtol=1e-4, atol=1e-5)
    assert covered == {name: p.numel() for name, p in shapes.items()}


def partly_used(addresses, rank):
    """Take two steps in which the first rank's micro-batch skips the second layer."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, placed = in_servers(addresses, rank)
    if rank == 0:
        model.layers[1].forward = lambda h, *_, **__: h
    with placed:
        stage = PlacedStage(placed)
        return [stage_step(model, stage, step, [rank], 0.3)[1] for step in range(2)]


@pytest.mark.slow
def test_a_block_that_only_some_ranks_use_is_updated(addresses):  # Rules 5 and 6
    norms_of_ranks = world.run(2, functools.partial(partly_used, addresses(1)))
    model, optimizer = build()
    norms = []
    for step in range(2):
        loss_of(model, step, 1).backward()
        layer = model.layers[1].forward
        model.layers[1].forward = lambda h, *_, **__: h
        loss_of(model, step, 0).backward()
        model.layers[1].forward = layer
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms_of_ranks == [pytest.approx(norms, rel=1e-4)] * 2


def take_steps(model, stage, rank, steps):
    return [stage_step(model, stage, step, range(rank, MICROS, 2)) for step in steps]


def refilled(addresses, others, rank):
    """Servers go back to pieces that both ranks read from them earlier, and so do new servers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    links = control_links([RankPlace("c", "h", f"rank {r}") for r in range(2)], 40.0)
    model, placed = in_servers(addresses, rank)
    with placed:
        stage = PlacedStage(placed)
        take_steps(model, stage, rank, [0, 1])
        extents = stage.extents()
        kept = Kept([stage.piece(extent) for extent in extents])
        expected = take_steps(model, stage, rank, [2, 3])
        stage.load(exchange(kept, stage.needed(), links), 2)
        repeated = take_steps(model, stage, rank, [2, 3])
        assert placed.committed_step >= 2
    model, placed = in_servers(addresses, rank)  # the servers still hold the loaded values
    with placed:
        stage = PlacedStage(placed)
        resumed = stage.steps_done
        links.agree(resumed, "that both are here")
    model, placed = in_servers(others, rank)
    with placed:
        stage = PlacedStage(placed)
        stage.load(exchange(kept, stage.needed(), links), 2)
        elsewhere = take_steps(model, stage, rank, [2, 3])
    return expected, repeated, resumed, elsewhere


@dataclass
class Kept:
    pieces: list

    def extents(self):
        return [piece.extent for piece in self.pieces]

    def piece(self, extent):
        (whole,) = [
            piece
            for piece in self.pieces
            if piece.extent.name == extent.name
            and piece.extent.start <= extent.start
            and extent.stop <= piece.extent.stop
        ]
        cut = slice(extent.start - whole.extent.start, extent.stop - whole.extent.start)
        return Piece(extent, {k: v[cut] for k, v in whole.arrays.items()}, whole.scalars)


@pytest.mark.slow
def test_servers_load_the_values_of_a_snapshot(addresses):
    results = world.run(2, functools.partial(refilled, addresses(2), addresses(1)))
    for result in results:
        assert isinstance(result, tuple), results
        expected, repeated, resumed, elsewhere = result
        assert repeated == expected == elsewhere  # Rule 1
        assert resumed == 4


def tied_over_stages(rank):
    """Take a step in two stages of a rank each; both have the whole model and share the tied weight."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, placed = staged(Memory(), tied=True)
    with placed:
        copies = SharedCopies(dist.group.WORLD, (1, 1), torch.device("cpu"))
        stage = PlacedStage(placed, [(["embed.weight"], copies)])
        stage.begin_step(1)
        loss_of(model, 0, rank).backward()
        squares = stage.sum_squares()
        stage.step()
        (extent,) = [e for e in stage.extents() if e.name == "embed.weight"]
        return squares, stage.piece(extent).arrays["exp_avg"].tolist()


@pytest.mark.slow
def test_copies_of_a_tied_parameter_get_the_same_gradient():
    os.environ.pop("RANK", None)
    results = world.run(2, tied_over_stages)
    assert all(isinstance(result, tuple) for result in results), results
    assert results[0][1] == results[1][1]  # bit for bit
    model, _ = build(tied=True)
    own = []
    for rank in range(2):
        model.zero_grad()
        loss_of(model, 0, rank).backward()
        own.append({n: p.grad.clone() for n, p in model.named_parameters()})
    both = own[0]["embed.weight"] + own[1]["embed.weight"]
    torch.testing.assert_close(
        torch.tensor(results[0][1]), 0.1 * both.flatten(), rtol=1e-4, atol=1e-8
    )
    rest = [
        sum(float(g.square().sum()) for n, g in grads.items() if n != "embed.weight")
        for grads in own
    ]
    assert results[0][0] == pytest.approx(rest[0] + float(both.square().sum()), rel=1e-4)
    assert results[1][0] == pytest.approx(rest[1], rel=1e-4)


class NoStore:
    """The part of a placed optimizer of a bf16 root block that the sum of copies needs."""

    def __init__(self, p):
        self.group, self.root_waits, self.steps_done = WorkerIdentity(), False, 4
        spec = ParamSpec("w", tuple(p.shape), "bf16", True, 0)
        self.params, self.param_groups = [spec], [{"params": [p]}]
        self.root = SimpleNamespace(specs=[spec], params=[("w", p)], pass_ended=lambda: None)
        self.square_sums = self.step = self.zero_grad = dict


def copies_of_a_rank(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # long enough for all imports
    copies, store = dist.new_group(timeout=timedelta(seconds=20)), _get_default_store()
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    p.grad = torch.tensor([256.0 if rank == 0 else 1.0, float(rank)], dtype=torch.bfloat16)
    stage = PlacedStage(NoStore(p), [(["w"], SharedCopies(copies, (1, 1, 1), torch.device("cpu")))])
    stage.sum_squares()
    total = p.grad.tolist()
    stage.step()
    if rank:
        store.wait(["the first rank has the sum"])
        os._exit(0)
    store.set("the first rank has the sum", "")
    try:
        stage.sum_squares()
    except RoadtrainError as error:
        return total, type(error), str(error)


@pytest.mark.slow
def test_copies_are_added_in_fp32_and_a_lost_stage_is_reported():  # Rules 1 and 5
    ((total, kind, message),) = world.run(3, copies_of_a_rank, answers=1)
    assert total == [258.0, 3.0]  # in bf16 256 + 1 is 256
    assert issubclass(kind, PeerError) and "step 5: the sum of the copies of 'w'" in message


def cut_stage(segment, store):
    model, optimizer = build_deep()
    cuts = Cuts(model, (micro(0, 0)[0],), {}, None)
    stage_model = StageModel(model, cuts, [segment])
    own = {*model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p in own]
    placed = roadtrain.place(
        model,
        optimizer,
        store=store,
        host_budget="200MiB",
        group=WorkerIdentity(),
        blocks=stage_model.own_names,
        report=lambda line: None,
    )
    stage_model.attach()
    return stage_model, PlacedStage(placed)


def build_deep():
    torch.manual_seed(3)
    model = Net(depth=4, width=32, dropout=0.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def pipelined(stages, step):
    """Run all forwards, then all backwards, through stages in one process; return the loss."""
    for _, optimizer in stages:
        optimizer.begin_step(MICROS)
    total, kept = 0.0, []
    for number in range(MICROS):
        x, y = micro(step, number)
        received, boundaries = (), []
        for stage_model, _ in stages:
            ended, value = stage_model.run(stage_model.segments[0], received, MicroBatch((x,)))
            if ended:
                value = functional.cross_entropy(value.flatten(0, 1), y.flatten()) / MICROS
                total += float(value.detach())
            received_value = value.detach().requires_grad_()
            boundaries.append((value, received_value))
            received = (received_value,)
        kept.append(boundaries)
    for boundaries in kept:
        boundaries[-1][0].backward()
        for value, received_value in reversed(boundaries[:-1]):
            value.backward(received_value.grad)
    for _, optimizer in stages:
        optimizer.step()
    return total


def test_stages_with_different_stores_train_as_plain_torch(tmp_path):
    stores = [Memory(), Files(tmp_path / "middle"), Memory()]
    segments = [Segment(0, 1), Segment(1, 3), Segment(3, 4)]
    stages = [cut_stage(*pair) for pair in zip(segments, stores, strict=True)]
    found = [pipelined(stages, step) for step in range(3)]
    for _, optimizer in stages:
        optimizer.close()
    model, optimizer = build_deep()
    for step in range(3):
        losses = [loss_of(model, step, number) for number in range(MICROS)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found[step] == pytest.approx(sum(float(x.detach()) for x in losses), rel=1e-5)


@pytest.mark.slow
def test_a_pipeline_whose_stages_have_different_stores(addresses, tmp_path):
    """The first stage uses servers, the second its rank's memory, the third files."""
    shape, steps = Parallelism(pp=3, stages=(1, 2, 1)), 3
    spec = PipelineSpec(
        tmp_path / "run",
        shape,
        steps,
        on_servers={0: addresses(2)},
        on_files=(2,),
        options={"dropout": 0.0},
    )
    assert pipeline_job.start(spec) == ["ended"] * 3
    found = pipeline_job.losses(spec.home)
    model, optimizer = pipeline_job.build_model(dropout=0.0)
    for step in range(steps):
        total = 0.0
        for number in range(pipeline_job.MICROS):
            batch = pipeline_job.micro(step, number)
            loss = pipeline_job.loss_of(model(*batch.args), batch) / pipeline_job.MICROS
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert float.fromhex(found[step]) == pytest.approx(total, rel=2e-5)
