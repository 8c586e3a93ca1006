"""The layout of a model's parameters: each block consists of flat runs, and each run is cut into
chunks, which are transferred and stored. Does NOT use files, tensors or devices.

A *run* contains the parameters of a block with the same dtype, trainability and optimizer parameter
group. Each parameter starts at a multiple of 32 elements, and the run is padded with zeros to a
multiple of 2048. A *chunk* is a contiguous range of one run. Every chunk size is a multiple of
65536 elements, over which partial sums are formed. So a partial sum has the same bits for every
chunk size (Rule 1).

A chunk is stored as a *record*: [weights | state]. A pull returns the weights. The state is
everything else that the update rule needs: the fp32 master copy if the weights are not fp32, the
state arrays, and float64 scalars. The record of a frozen chunk has no state.

Assumes that parameter names are unique and that each parameter belongs to one block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from roadtrain.errors import ConfigError
from roadtrain.units import round_up

PARAM_ALIGN = 32  # elements: 64 bytes in bf16, so rows are aligned for vector kernels
# elements: they fill a page in a 2-byte dtype, so direct I/O can address each run of a block
RUN_ALIGN = 2048
SEGMENT = 1 << 16  # elements of a partial sum; every chunk size is a multiple of SEGMENT
MAX_CHUNK = 1 << 20  # elements
PAGE = 4096  # bytes: direct I/O needs offsets, lengths and addresses that are multiples of this

# the numpy dtype in which values of each dtype are kept; 16-bit floats are kept as uint16
NUMPY = {
    "fp32": "f4",
    "bf16": "u2",
    "fp16": "u2",
    "fp64": "f8",
    "i8": "i1",
    "u8": "u1",
    "i16": "i2",
    "i32": "i4",
    "i64": "i8",
    "bool": "u1",
}
ITEMSIZE = {dtype: int(code[1:]) for dtype, code in NUMPY.items()}
TRAINABLE = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the model. `group` is the index of the parameter's optimizer group, or -1 if
    the parameter is in no group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Span:
    """A slice of a parameter inside a run or a chunk.

    Elements [start, stop) of the run or chunk are elements [origin, origin + stop - start) of the
    parameter. `param` is the index of the parameter in ChunkTable.params.
    """

    param: int
    start: int
    stop: int
    origin: int


@dataclass(frozen=True)
class Run:
    """The parameters of one block that share dtype, parameter group and trainability. `offset` and
    `push_offset` are the byte offsets of the run in the block's flat buffers of parameters and of
    gradients. The gradient buffer contains only trainable runs."""

    block: int
    index: int  # position of the run among the block's runs
    dtype: str
    group: int
    trainable: bool
    numel: int  # elements, including the padding at the end
    offset: int
    push_offset: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Chunk(Run):
    """A contiguous range of a Run. The fields `numel`, `offset`, `push_offset` and `spans` describe
    this range."""

    id: int  # position in ChunkTable.chunks
    start: int  # position in the run of the chunk's first element

    @property
    def weights_nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @cached_property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """The ranges over which partial sums are formed, each as (param, start, stop), where start
        and stop are positions in the chunk. Each range lies in one parameter and in one segment of
        65536 elements of the run."""
        out = []
        for span in self.spans:
            at = span.start
            while at < span.stop:
                cut = min(span.stop, ((self.start + at) // SEGMENT + 1) * SEGMENT - self.start)
                out.append((span.param, at, cut))
                at = cut
        return tuple(out)


@dataclass(frozen=True)
class Block:
    """A block of the model.

    `params` are the indices of the block's parameters in ChunkTable.params, including parameters
    without elements. `pull_nbytes` is the size of the flat buffer for the block's parameters, and
    `push_nbytes` the size of the flat buffer for its gradients. Both are in bytes, padded to pages.
    """

    index: int
    name: str
    params: range
    runs: tuple[Run, ...]
    chunks: tuple[Chunk, ...]
    pull_nbytes: int
    push_nbytes: int

    @property
    def trainable(self) -> list[Chunk]:
        return [c for c in self.chunks if c.trainable]


@dataclass(frozen=True)
class Record:
    """The layout of a chunk's record. `master`, `arrays` and `scalars` are byte offsets, multiples
    of 4096. `master` is 0 if the weights themselves are the fp32 master copy."""

    weights_nbytes: int  # padded to pages
    state_nbytes: int  # padded to pages
    master: int
    arrays: tuple[int, ...]
    scalars: int

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + self.state_nbytes


def record(chunk: Chunk, n_arrays: int, n_scalars: int, staleness: int = 0) -> Record:
    """Lay out the record of `chunk` for an update rule with `n_arrays` state arrays and `n_scalars`
    scalars for each parameter in the chunk.

    If `staleness` is not 0, the stored weights are one update older than the master copy, so the
    last two versions can be pulled.
    """
    weights = round_up(chunk.weights_nbytes, PAGE)
    if not chunk.trainable:
        return Record(weights, 0, 0, (), 0)
    size = round_up(chunk.numel * 4, PAGE)
    master = weights if chunk.dtype != "fp32" or staleness else 0
    first = master + size if master else weights
    scalars = first + n_arrays * size
    stop = scalars + round_up(n_scalars * len(chunk.spans) * 8, PAGE)
    return Record(weights, stop - weights, master, tuple(range(first, scalars, size)), scalars)


@dataclass(frozen=True)
class ChunkTable:
    """All blocks of a model. Block 0 is the root block, which may be empty. The other blocks follow
    in the order of the model's modules."""

    blocks: tuple[Block, ...]
    params: tuple[ParamSpec, ...]
    chunks: tuple[Chunk, ...]
    chunk_elements: int

    @staticmethod
    def build(
        blocks: Iterable[tuple[str, Sequence[ParamSpec]]], chunk_elements: int = MAX_CHUNK
    ) -> ChunkTable:
        """Lay out `blocks`, pairs of a block's name and its parameters. The root block is first.

        Raises ConfigError if the chunk size is invalid, if a parameter name is repeated, or if the
        dtype of a parameter is not supported. A trainable parameter must be fp32, bf16 or fp16.
        """
        if not 0 < chunk_elements <= MAX_CHUNK or chunk_elements % SEGMENT:
            raise ConfigError(
                f"chunk_elements is {chunk_elements}, but must be a multiple of {SEGMENT}",
                hint=f"choose a multiple of {SEGMENT}, at most {MAX_CHUNK}",
            )
        out: list[Block] = []
        params: list[ParamSpec] = []
        chunks: list[Chunk] = []
        for index, (name, specs) in enumerate(blocks):
            block = _lay_out(index, name, specs, len(params), len(chunks), chunk_elements)
            out.append(block)
            params.extend(specs)
            chunks.extend(block.chunks)
        names = [p.name for p in params]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ConfigError(f"parameter name {twice!r} appears twice in the model's blocks")
        return ChunkTable(tuple(out), tuple(params), tuple(chunks), chunk_elements)

    @cached_property
    def trainable(self) -> tuple[Chunk, ...]:
        return tuple(c for c in self.chunks if c.trainable)

    def fingerprint(self) -> str:
        """Return a hash of the names, shapes and trainability of all parameters."""
        params = [[self.params[s.param] for run in b.runs for s in run.spans] for b in self.blocks]
        body = [
            [b.name, sorted([p.name, *p.shape, p.trainable] for p in own)]
            for b, own in zip(self.blocks, params)
        ]
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:32]


def _lay_out(
    index: int,
    name: str,
    specs: Sequence[ParamSpec],
    first_param: int,
    first_chunk: int,
    chunk_elements: int,
) -> Block:
    members: dict[tuple[bool, str, int], list[int]] = {}
    for i, spec in enumerate(specs):
        if spec.dtype not in ITEMSIZE:
            raise ConfigError(
                f"parameter {spec.name!r} has dtype {spec.dtype}; supported: {', '.join(ITEMSIZE)}"
            )
        if spec.trainable and spec.dtype not in TRAINABLE:
            raise ConfigError(
                f"parameter {spec.name!r} has dtype {spec.dtype}, but trainable dtypes are"
                f" {', '.join(TRAINABLE)}",
                hint="cast the parameter or freeze it",
            )
        members.setdefault((spec.trainable, spec.dtype, spec.group), []).append(i)
    runs: list[Run] = []
    chunks: list[Chunk] = []
    pull_at = push_at = 0
    for (trainable, dtype, group), indices in members.items():
        spans, at = [], 0
        for i in indices:
            if specs[i].numel == 0:
                continue
            spans.append(Span(first_param + i, at, at + specs[i].numel, 0))
            at += round_up(specs[i].numel, PARAM_ALIGN)
        if not spans:
            continue
        numel, size = round_up(at, RUN_ALIGN), ITEMSIZE[dtype]
        run = Run(index, len(runs), dtype, group, trainable, numel, pull_at, push_at, tuple(spans))
        runs.append(run)
        for start in range(0, numel, chunk_elements):
            length = min(chunk_elements, numel - start)
            chunks.append(
                Chunk(
                    index,
                    run.index,
                    dtype,
                    group,
                    trainable,
                    length,
                    pull_at + start * size,
                    push_at + start * size,
                    cut_spans(spans, start, start + length),
                    first_chunk + len(chunks),
                    start,
                )
            )
        pull_at += round_up(numel * size, PAGE)
        push_at += round_up(numel * size, PAGE) if trainable else 0
    own = range(first_param, first_param + len(specs))
    return Block(index, name, own, tuple(runs), tuple(chunks), pull_at, push_at)


def cut_spans(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Return the slices of `spans` inside [start, stop), with positions relative to `start`."""
    return tuple(
        Span(
            s.param,
            max(s.start, start) - start,
            min(s.stop, stop) - start,
            s.origin + max(0, start - s.start),
        )
        for s in spans
        if s.start < stop and s.stop > start
    )
