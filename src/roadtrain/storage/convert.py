"""Access to records by parameter name: read a parameter, fill chunks from a source, or convert a
store to other blocks, chunks, dtypes or directories.

A *source* is a function that returns elements [start, stop) of one array of a parameter: "master"
(fp32; for a frozen parameter, its own dtype), a state array (fp32) or a state scalar (one float64).
If a source returns None, the array in the record is not changed. The weights of trainable
parameters are always cast from the fp32 master, so a conversion loses nothing. Values of bf16 and
fp16 are arrays of dtype uint16.

Needs memory for a few records. Reads no other file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.chunks import NUMPY, Chunk, ParamSpec
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import ConfigError, ForeignError
from roadtrain.kernels.cast import cast
from roadtrain.retry import undone_on_error
from roadtrain.storage.generation import OpenedStore, create_store
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.storage.tier import RECORD, WEIGHTS

Array = np.ndarray[Any, Any]
Source = Callable[[ParamSpec, str, int, int], Array | None]  # (parameter, array name, start, stop)
MASTER = "master"
_KEPT = 4  # old records cached while converting
_WIDENS = {("bf16", "fp32"), ("fp16", "fp32")}


class RecordView:
    """A chunk's record in memory, with access by array name."""

    def __init__(self, meta: StoreMeta, chunk: Chunk, view: memoryview) -> None:
        self.chunk, self.view, self.record = chunk, view, meta.records[chunk.id]
        self.rule = meta.groups[chunk.group] if chunk.trainable else GroupRule("")

    @staticmethod
    def empty(meta: StoreMeta, chunk: Chunk) -> RecordView:
        """A record of zeros."""
        return RecordView(meta, chunk, Buffer(meta.records[chunk.id].nbytes).view)

    @property
    def names(self) -> tuple[str, ...]:
        return (MASTER, *self.rule.arrays, *self.rule.scalars)

    def array(self, what: str) -> Array:
        """Return all elements of "weights", "master" or a state array. For a state scalar, return a
        float64 array with one value per span. (A span is a parameter's range in the chunk.)"""
        numel, chunk = self.chunk.numel, self.chunk
        if what == WEIGHTS or (what == MASTER and not self.record.master):
            return array_in(self.view, chunk.dtype, 0, numel)
        offsets = {MASTER: self.record.master, **dict(zip(self.rule.arrays, self.record.arrays))}
        if what in offsets:
            return array_in(self.view, "fp32", offsets[what], numel)
        return self.rows[:, self.rule.scalars.index(what)]

    @property
    def rows(self) -> Array:
        """The state scalars as a float64 array of shape [spans, scalars]."""
        shape = len(self.chunk.spans), len(self.rule.scalars)
        return array_in(self.view, "fp64", self.record.scalars, prod(shape)).reshape(shape)

    def piece(self, what: str, span: int) -> Array:
        """Return the elements of the array `what` (see `array`) that belong to the chunk's span
        with index `span`. For a state scalar, return an array of one value."""
        if what in self.rule.scalars:
            return self.array(what)[span : span + 1]
        at = self.chunk.spans[span]
        return self.array(what)[at.start : at.stop]

    def fill(self, params: Sequence[ParamSpec], source: Source) -> None:
        """Fill the record with the values that `source` returns, then cast the weights from the
        master."""
        for i, span in enumerate(self.chunk.spans):
            for what in self.names:
                values = source(
                    params[span.param], what, span.origin, span.origin + span.stop - span.start
                )
                if values is not None:
                    self.piece(what, i)[...] = values
        self.cast_weights()

    def cast_weights(self) -> None:
        if self.record.master:
            cast(self.array(MASTER), "fp32", self.array(WEIGHTS), self.chunk.dtype)


def read_record(store: OpenedStore, chunk: Chunk, what: str = "") -> RecordView:
    """Read the newest record of `chunk`, or at least its array `what`. "" stands for all arrays."""
    view, tier = RecordView.empty(store.meta, chunk), store.tier_of(chunk.id)
    parts = (
        (WEIGHTS, MASTER) if not view.record.master else () if store.meta.staleness else (WEIGHTS,)
    )
    if tier.has_weights(chunk.id) and what in parts:
        tier.read(chunk.id, WEIGHTS, view.view[: view.record.weights_nbytes])
        return view
    tier.read(chunk.id, RECORD, view.view)
    if not tier.has_weights(chunk.id):
        view.cast_weights()
    return view


def read_param(store: OpenedStore, name: str, what: str = MASTER) -> Array:
    """Read an array of one parameter.

    Args:
        what: "master", "weights", or the name of a state array or state scalar.

    Returns:
        An array in the shape of the parameter. A state scalar is a float64 array of one element.
    """
    return gather_param(store.meta, name, what, partial(read_record, store, what=what))


def gather_param(
    meta: StoreMeta, name: str, what: str, record_of: Callable[[Chunk], RecordView]
) -> Array:
    """Read the array `what` of the parameter `name` from the records that `record_of` returns."""
    param = next((p for p in meta.table.params if p.name == name), None)
    if param is None:
        raise ConfigError(f"there is no parameter named {name!r}")
    rule = meta.groups[param.group] if param.trainable else GroupRule("")
    if what not in (WEIGHTS, MASTER, *rule.arrays, *rule.scalars):
        raise ConfigError(
            f"parameter {name!r} has no array {what!r}; it has"
            f" {', '.join(('master', 'weights', *rule.arrays, *rule.scalars))}"
        )
    out = _gather(meta, param, what, record_of, 0, param.numel)
    return out if what in rule.scalars and param.numel else out.reshape(param.shape)


def param_pieces(
    meta: StoreMeta, name: str, what: str, record_of: Callable[[Chunk], RecordView]
) -> Iterator[tuple[int, Array]]:
    """Read the array `what` of the parameter `name` chunk by chunk. For each chunk, yields (index
    of the first element in the parameter, flat array of values)."""
    param = next(p for p in meta.table.params if p.name == name)
    for _, _, span in meta.where.get(name, ()):
        stop = span.origin + span.stop - span.start
        yield span.origin, _gather(meta, param, what, record_of, span.origin, stop)


def _gather(
    meta: StoreMeta,
    param: ParamSpec,
    what: str,
    record_of: Callable[[Chunk], RecordView],
    start: int,
    stop: int,
) -> Array:
    """Return elements [start, stop) of the array `what` of `param` as a flat array, or one value
    for a state scalar."""
    # with staleness, the weights part is one update behind the master
    late = meta.staleness and param.trainable and what == WEIGHTS
    out = np.empty(
        stop - start, NUMPY[param.dtype if what == WEIGHTS or not param.trainable else "fp32"]
    )
    for chunk, i, span in meta.where.get(param.name, ()):
        first, last = max(start, span.origin), min(stop, span.origin + span.stop - span.start)
        if first >= last:
            continue
        view = record_of(chunk)
        piece = view.piece(MASTER if late else what, i)
        if what in view.rule.scalars:
            return piece.copy()
        piece = piece[first - span.origin : last - span.origin]
        target = out[first - start : last - start]
        cast(piece, "fp32", target, param.dtype) if late else np.copyto(target, piece)
    return out


def write_params(store: OpenedStore, source: Source) -> None:
    """Write every chunk of a new store with the values that `source` returns. The caller must
    commit the store afterwards."""
    for chunk in store.table.chunks:
        view = RecordView.empty(store.meta, chunk)
        view.fill(store.table.params, source)
        store.tier_of(chunk.id).write(chunk.id, RECORD, view.view)


def rewritten(
    old: OpenedStore,
    change: Callable[[RecordView], None],
    step: int,
    blob: bytes,
    *,
    direct: bool = True,
) -> OpenedStore:
    """Replace `old` by a copy in which `change` has modified every record. Returns the copy,
    committed at `step` with the opaque bytes `blob`.

    `old` is then closed and removed; after an error, it is unchanged. Raises FullError if there is
    no room for the copy.
    """
    new = create_store(old.directories, old.meta, old.meta.owners, direct=direct, former=old)
    with _replacing(new, step, blob):
        for chunk in old.table.chunks:
            view = read_record(old, chunk)
            change(view)
            new.tier_of(chunk.id).write(chunk.id, RECORD, view.view)
    return new


@contextmanager
def _replacing(new: OpenedStore, step: int, blob: bytes) -> Iterator[None]:
    """Context manager whose body writes all records of `new`. Afterwards they are committed, and
    `new` replaces its former store. After an error, `new` is removed."""
    with undone_on_error(new.discard):
        yield
        new.commit(step, blob)
    new.publish()


def needs_conversion(old: OpenedStore, meta: StoreMeta, directories: Sequence[str | Path]) -> bool:
    """Whether `old` differs from `meta` in its blocks, chunk size, dtypes or update rules, or is in
    other directories. The distribution of chunks over the same directories does not count."""
    want = (meta.blocks, meta.chunk_elements, meta.groups)
    have = (old.meta.blocks, old.meta.chunk_elements, old.meta.groups)
    homes = [Path(directory).resolve() for directory in directories]
    return want != have or homes != [home.resolve() for home in old.directories]


def convert(
    old: OpenedStore,
    meta: StoreMeta,
    directories: Sequence[str | Path],
    owners: Sequence[int],
    *,
    direct: bool = True,
) -> OpenedStore:
    """Convert `old` exactly, at the same step, to the blocks, chunks and update rules of `meta`.

    `meta` must describe the same model. `old` is closed and removed once the new store is
    published. If the process is killed before that, `old` stays the current store.

    Raises:
        ForeignError: The update rules of `meta` need other optimizer state than `old` has.
        ConfigError: A frozen parameter would lose precision.
    """
    _check_convertible(old.meta, meta)
    new = create_store(
        directories, replace(meta, job=old.meta.job), owners, direct=direct, former=old
    )
    with _replacing(new, old.step, old.blob):
        write_params(new, _from_store(old))
    return new


def _check_convertible(old: StoreMeta, new: StoreMeta) -> None:
    before = {p.name: p for p in old.table.params}
    for param in new.table.params:
        was = before[param.name]
        if param.trainable:
            held, needed = old.groups[was.group], new.groups[param.group]
            if {*held.arrays, *held.scalars} != {*needed.arrays, *needed.scalars}:
                raise ForeignError(
                    f"parameter {param.name!r} has state {held}, but the job needs {needed}",
                    hint="after changing the optimizer, export the parameters to a new store",
                )
        elif was.dtype != param.dtype and (was.dtype, param.dtype) not in _WIDENS:
            raise ConfigError(
                f"frozen parameter {param.name!r} is stored in {was.dtype} and would lose precision"
                f" in {param.dtype}",
                hint="keep its dtype, as it has no fp32 master, or start a new store",
            )


def _from_store(old: OpenedStore) -> Source:
    """Return a source that reads the records of `old`. The last few records are cached."""
    before = {p.name: p for p in old.table.params}

    @lru_cache(_KEPT)
    def read(chunk: int) -> RecordView:
        return read_record(old, old.table.chunks[chunk])

    def source(param: ParamSpec, what: str, start: int, stop: int) -> Array | None:
        was = before[param.name]
        values = _gather(old.meta, was, what, lambda chunk: read(chunk.id), start, stop)
        if param.trainable or was.dtype == param.dtype:
            return values
        wide = np.empty(len(values), NUMPY[param.dtype])
        cast(values, was.dtype, wide, param.dtype)
        return wide

    return source
