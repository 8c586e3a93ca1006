"""Helpers for tests that move state: random tensors as a source of pieces, and linked ranks."""

import itertools
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist

from roadtrain.errors import DamagedError
from roadtrain.stages.control_links import ControlLinks, RankPlace
from roadtrain.stages.pieces import VALUE, Extent, Piece

SIZES = {"first.weight": 4000, "first.bias": 1, "second.weight": 12345}


def whole(name, key, version=0):
    """All elements of an array of a parameter, equal in every process."""
    seed = torch.Generator().manual_seed(len(name) * 100 + len(key) + 7919 * version)
    return torch.randn(SIZES[name], generator=seed)


class RandomSource:
    """Part of the tensors made by `whole`. broken: Name of a parameter that cannot be read."""

    def __init__(self, extents, version=0, broken=""):
        self._extents, self._version, self._broken = extents, version, broken

    def extents(self):
        return self._extents

    def piece(self, extent):
        if extent.name == self._broken:
            raise DamagedError(f"{extent.name} is damaged")
        cut = slice(extent.start, extent.stop)
        keys = [VALUE, "exp_avg"] if "weight" in extent.name else [VALUE]
        arrays = {key: whole(extent.name, key, self._version)[cut].clone() for key in keys}
        return Piece(extent, arrays, {"step": 3.0 + self._version})


def spread(seed, ranks):
    """Spread every element over the ranks, each element on one rank."""
    choose, out = random.Random(seed), [[] for _ in range(ranks)]
    for name, size in SIZES.items():
        cuts = sorted({0, size, *(choose.randrange(size + 1) for _ in range(5))})
        for start, stop in itertools.pairwise(cuts):
            out[choose.randrange(ranks)].append(Extent(name, start, stop))
    return out


def same_as_whole(pieces, expected, version=0):
    """Assert that pieces equal `whole` and cover the expected extents. Returns the number of
    elements."""
    elements = {(e.name, i) for e in expected for i in (e.start, e.stop - 1) if e.numel}
    seen = set()
    total = 0
    for piece in pieces:
        cut = slice(piece.extent.start, piece.extent.stop)
        assert VALUE in piece.arrays and piece.scalars == {"step": 3.0 + version}
        for key, array in piece.arrays.items():
            assert torch.equal(array, whole(piece.extent.name, key, version)[cut])
        total += piece.extent.numel
        seen |= {
            (piece.extent.name, piece.extent.start),
            (piece.extent.name, piece.extent.stop - 1),
        }
    assert elements <= seen
    assert total == sum(e.numel for e in expected)
    return total


def linked(rank, deadline_s=20.0):
    """Control links of this rank, with two clusters and a host per rank."""
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    places = [RankPlace("ab"[r * 2 // ranks], f"host{r}", f"stage {r}") for r in range(ranks)]
    return control_links(places, deadline_s)


def control_links(places, deadline_s):
    """Control links between all ranks of the default group."""
    return ControlLinks(dist.group.WORLD, dist.new_group(), places, deadline_s)
