"""TensorSplit and TensorPieces: the elements of a parameter that a tensor rank holds, as positions
in the whole parameter."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from roadtrain.errors import ConfigError
from roadtrain.stages.control_links import RankPlace
from roadtrain.stages.pieces import VALUE, Extent, Piece
from roadtrain.stages.snapshot_choice import ParamEntry
from roadtrain.stages.snapshots import JobSnapshots, SnapshotOptions
from roadtrain.stages.tensor import TensorParallel, device_of
from roadtrain.stages.tensor_pieces import TensorPieces
from roadtrain.stages.tensor_split import TensorSplit
from roadtrain.stages.tensor_styles import Summed
from tests.support.thread_links import run_ranks

# shape, dim, parts, padded
SHAPES = [
    ((12, 5), 0, 1, False),
    ((5, 12), 1, 1, False),
    ((5, 24), 1, 3, False),
    ((24,), 0, 3, False),
    ((2, 12, 3), 1, 1, False),
    ((11, 3), 0, 1, True),
    ((5, 3), 0, 1, True),  # the last of 4 ranks has only padding
]
DEGREES = [1, 2, 4]


def whole_of(shape):
    """A tensor whose elements are their own positions."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("shape", "dim", "parts", "padded"), SHAPES)
def test_the_parts_of_all_ranks_make_up_the_whole(shape, dim, parts, padded, degree):
    split, whole = TensorSplit(shape, dim, degree, parts, padded), whole_of(shape)
    locals_ = [split.local_value(whole, rank) for rank in range(degree)]
    assert all(x.shape == split.local_shape for x in locals_)
    assert torch.equal(split.whole_value(locals_), whole)
    columns = whole.chunk(parts, dim) if not padded else [whole]
    for rank, local in enumerate(locals_):
        if not padded:  # the rank's columns of each part
            right = torch.cat([c.chunk(degree, dim)[rank] for c in columns], dim)
            assert torch.equal(local, right)
        real = split.real(rank)
        places = split.positions(rank, 0, real)
        assert torch.equal(places, local.flatten()[:real].long())
        assert [split.position(rank, i) for i in range(real)] == places.tolist()
        assert not local.flatten()[real:].any(), "padding is zeros"
        for at in range(split.numel + 1):
            assert split.before(rank, at) == int((places < at).sum())


def test_an_indivisible_dimension_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"10 rows or columns .* tp 4"):
        TensorSplit((10, 3), 0, 4)
    with pytest.raises(ConfigError, match=r"2 rows or columns .* tp 4"):
        TensorSplit((3, 6), 1, 4, parts=3)


@dataclass(frozen=True)
class Mesh:
    """Position of a rank, without a process group."""

    rank: int
    degree: int

    device_type: str = "cpu"

    def get_local_rank(self):
        return self.rank

    def size(self):
        return self.degree


class Kept:
    """The optimizer of rank `data` of `width`, which cuts parameters into shares without regard to
    rows or parts."""

    def __init__(self, values, data=0, width=1):
        self.values = {name: x.flatten().clone() for name, x in values.items()}
        self.state = {name: -x for name, x in self.values.items()}
        self.data, self.width = data, width
        self.loaded = 0

    def extents(self):
        out = []
        for name, x in self.values.items():
            a, b = (len(x) * (self.data + i) // self.width for i in (0, 1))
            if a < b:
                out.append(Extent(name, a, b))
        return out

    def needed(self):
        return self.extents()

    def piece(self, extent):
        own = slice(extent.start, extent.stop)
        arrays = {VALUE: self.values[extent.name][own], "exp_avg": self.state[extent.name][own]}
        return Piece(extent, {k: x.clone() for k, x in arrays.items()}, {"step": 3.0})

    def take(self, pieces, hypers):
        for piece in pieces:
            own = slice(piece.extent.start, piece.extent.stop)
            self.values[piece.extent.name][own] = piece.arrays[VALUE]
            if not piece.scalars:  # state of a first step, for padding only
                assert piece.arrays.keys() == {VALUE} and not piece.arrays[VALUE].any()
            else:
                assert piece.scalars == {"step": 3.0}
            self.state[piece.extent.name][own] = piece.arrays.get("exp_avg", torch.zeros(()))
            self.loaded += piece.extent.numel


def parameters():
    """Whole values, and a function that splits them by `degree`."""
    whole = {"norm": whole_of((7,))} | {
        f"p{i}": whole_of(shape) for i, (shape, *_) in enumerate(SHAPES)
    }

    def splits(degree):
        return {
            f"p{i}": TensorSplit(shape, dim, degree, parts, padded)
            for i, (shape, dim, parts, padded) in enumerate(SHAPES)
        }

    return whole, splits


def stages(degree, width, chunk=7):
    """TensorPieces of all ranks of a stage, each with its part of the whole values."""
    whole, splits = parameters()
    shapes = {name: tuple(x.shape) for name, x in whole.items()}
    out = []
    for data in range(width):
        for rank in range(degree):
            split = TensorParallel(Mesh(rank, degree), shapes, splits(degree))
            own = {name: split.local_value(name, x) for name, x in whole.items()}
            out.append(TensorPieces(Kept(own, data, width), split, chunk))
    return out


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("degree", DEGREES)
def test_all_ranks_together_hold_every_element_once(degree, width):
    whole, _ = parameters()
    counts = {name: torch.zeros(x.numel(), dtype=torch.int64) for name, x in whole.items()}
    for stage in stages(degree, width):
        for extent in stage.extents():
            piece = stage.piece(extent)
            right = whole[extent.name].flatten()[extent.start : extent.stop]
            assert torch.equal(piece.arrays[VALUE], right)
            assert torch.equal(piece.arrays["exp_avg"], -right)
            assert piece.scalars == {"step": 3.0}
            counts[extent.name][extent.start : extent.stop] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("cut", [1, 5, 1000])
@pytest.mark.parametrize("to", [(1, 1), (2, 3), (4, 2)])
def test_pieces_of_other_ranks_are_loaded(to, cut):
    """In any cuts and any order."""
    whole, _ = parameters()
    for stage in stages(*to):
        inner = stage.inner
        right = {name: x.clone() for name, x in inner.values.items()}
        for x in (*inner.values.values(), *inner.state.values()):
            x.fill_(99.0)

        def pieces(stage=stage):
            for extent in reversed(stage.needed()):
                for start in range(extent.start, extent.stop, cut):
                    stop = min(start + cut, extent.stop)
                    value = whole[extent.name].flatten()[start:stop].clone()
                    arrays = {VALUE: value, "exp_avg": -value}
                    yield Piece(Extent(extent.name, start, stop), arrays, {"step": 3.0})

        stage.take(pieces(), ())
        assert inner.loaded == sum(e.numel for e in inner.needed()), "each element once"
        for extent in inner.needed():
            own = slice(extent.start, extent.stop)
            assert torch.equal(inner.values[extent.name][own], right[extent.name][own])
            assert torch.equal(inner.state[extent.name][own], -right[extent.name][own])


def test_pieces_hold_the_values_of_the_last_step():
    stage = stages(2, 1)[0]
    extent = stage.extents()[-1]
    before = stage.piece(extent)
    for x in stage.inner.values.values():
        x.add_(1.0)
    assert stage.extents()[-1] == extent
    assert torch.equal(stage.piece(extent).arrays[VALUE], before.arrays[VALUE] + 1.0)


def test_replicated_parameters_are_counted_once():
    groups = [stage.split for stage in stages(4, 1)]
    assert [split.counts("norm") for split in groups] == [True, False, False, False]
    assert all(split.counts("p0") for split in groups)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("to", [(1, 2), (4, 1), (2, 2)])
@pytest.mark.slow
def test_a_snapshot_is_read_with_another_degree(tmp_path, to, replicas):
    """Rule 3: a snapshot of tp 2, dp 2 is read with other degrees; each host has its own
    directory."""
    whole, _ = parameters()
    params = [ParamEntry(name, tuple(x.shape), "fp32", "adamw") for name, x in whole.items()]

    def kept(links):
        home = tmp_path / links.places[links.rank].host
        home.mkdir(exist_ok=True)
        options = SnapshotOptions(every=1, replicas=replicas)
        return JobSnapshots(home, links, params, options, report=lambda line: None)

    def save(links):
        snapshots = kept(links)
        snapshots.find()
        snapshots.save(3, stages(2, 2)[links.rank], {})

    def resume(links):
        stage = stages(*to)[links.rank]
        for x in (*stage.inner.values.values(), *stage.inner.state.values()):
            x.fill_(99.0)
        found = kept(links).find()
        stage.take(found.pieces(stage.needed()), ())
        return stage

    def run(ranks, work):
        places = [RankPlace("c", f"h{rank % 2}", f"rank {rank}") for rank in range(ranks)]
        out = run_ranks(places, work)
        for outcome in out:
            if isinstance(outcome, BaseException):
                raise outcome
        return out

    run(4, save)
    for stage, right in zip(run(to[0] * to[1], resume), stages(*to)):
        for extent in stage.inner.needed():
            own = slice(extent.start, extent.stop)
            for now, before in (
                (stage.inner.values, right.inner.values),
                (stage.inner.state, right.inner.state),
            ):
                assert torch.equal(now[extent.name][own], before[extent.name][own])


def test_a_rank_of_a_tensor_group_has_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(Mesh(0, 2)) == torch.device("cpu")
    assert device_of(Mesh(0, 2, "cuda")) == torch.device("cuda", 3)


def test_a_frozen_layer_between_split_layers_has_nothing_to_sum():
    layer = torch.nn.LayerNorm(4)
    layer.weight.requires_grad_(False)
    summed = []
    Summed().within(SimpleNamespace(total=lambda x: summed.append(x))).change(layer)
    layer(torch.ones(2, 4)).sum().backward()
    assert len(summed) == 1
