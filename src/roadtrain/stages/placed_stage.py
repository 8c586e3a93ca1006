"""PlacedStage: a pipeline stage whose parameters and optimizer state are in this host's files or
memory, or on servers that all ranks of the stage share. Does NOT fetch blocks (streaming/ does).

    group = group.of_stage(stage=1, replica=0, width=2)  # the first of two replicas of stage 1
    placed = roadtrain.place(stage.model, optimizer, store=..., group=group)
    stage_optimizer = PlacedStage(placed)

Servers average gradients, but a stage needs the sum, so gradients are multiplied by the number of
the stage's ranks. Nothing else may take steps with the placed optimizer.

Note "store commits": the store commits each step independently of the job's snapshots, so it may be
ahead of or behind the last snapshot. If its values differ from a loaded snapshot's, they are
overwritten, on shared servers by the stage's first rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from roadtrain.chunks import NUMPY, PAGE, ParamSpec
from roadtrain.errors import ConfigError, LoopError, RoadtrainError, StaleError
from roadtrain.kernels.cast import cast
from roadtrain.kernels.rule import Rule
from roadtrain.placement.optimizer import PlacedOptimizer
from roadtrain.stages.data_group import SharedCopies, ranks_of
from roadtrain.stages.op_queue import typed
from roadtrain.stages.pieces import VALUE, Extent, Piece, even_shares
from roadtrain.stages.transfers import check_covered
from roadtrain.storage.convert import MASTER, RecordView
from roadtrain.storage.scratch import Scratch
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.split import DTYPES
from roadtrain.units import round_up

# number of elements of a shared parameter's gradient that are summed at a time
SUM_ELEMENTS = 1 << 20


class PlacedStage:
    """The StageOptimizer (stages/stage_optimizer.py) of a stage whose parameters and state are in
    files, on servers, or in host memory.

    `shared`: for each set of stages that share parameters with this stage, the names of these
    parameters and the group of their copies. All of these stages must be placed. Raises ConfigError
    if a shared parameter is inside a block.
    """

    def __init__(
        self,
        placed: PlacedOptimizer,
        shared: Sequence[tuple[Sequence[str], SharedCopies]] = (),
    ) -> None:
        self.placed = placed
        self._shared = {name: copies for names, copies in shared for name in names}
        self.width = placed.group.workers
        self.param_groups: list[dict[str, Any]] = placed.param_groups
        self._names = {spec.name: i for i, spec in enumerate(placed.params)}
        root = {spec.name: p for spec, (_, p) in zip(placed.root.specs, placed.root.params)}
        self._copies = {name: root[name] for name in sorted(self._shared) if name in root}
        if absent := [n for n in self._shared if n in self._names and n not in root]:
            raise ConfigError(
                f"parameter {absent[0]!r} is shared by several stages, but is inside a block",
                hint="choose blocks=... so that shared parameters are outside of all blocks",
            )
        placed.root_waits = True
        self._finished = False  # whether all gradients of the step have been sent
        # the cached record: (step, chunk, record)
        self._record: tuple[int, int, RecordView] | None = None

    @property
    def steps_done(self) -> int:
        return self.placed.steps_done

    # a step

    def begin_step(self, backwards: int) -> None:
        """Begin a step. Raises LoopError if a previous backward was not followed by `step`."""
        if self._finished or any(p.grad is not None for p in self._parameters()):
            raise LoopError(
                f"step {self.steps_done + 1} begins with gradients that no update has used",
                hint="call step() after the backwards of each step",
            )

    def sum_squares(self) -> float:
        """Return the sum of the squares of the stage's summed gradients; 0 except on the stage's
        first rank."""
        self._finish_gradients()
        sums = self.placed.square_sums()
        if self.placed.group.rank:
            return 0.0
        return sum(value for index, value in sums.items() if self._counts(index))

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters with `scale` times the summed gradients, and clear the
        gradients."""
        self._finish_gradients()
        factor = for_mean(scale, self.width)
        for p in self._parameters():
            if isinstance(p.grad, PlacedGrad):
                p.grad.mul_(factor)
        self.placed.step()
        self.placed.zero_grad()
        self._finished = False

    def abandon(self) -> None:
        """Drop all pending work after an error, without waiting. Committed steps stay committed."""
        self.placed.abandon()
        with contextlib.suppress(RoadtrainError, RuntimeError):
            self.placed.close()

    def settle(self) -> None:
        """Wait until the store has committed the previous step."""
        self.placed.flush()

    def close(self) -> None:
        """Wait for pending work, and close the placed optimizer."""
        self.placed.close()

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    def _counts(self, index: int) -> bool:
        copies = self._shared.get(self.placed.params[index].name)
        return copies is None or copies.counts

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        """Sum the gradients of shared parameters over all stages, and pass all remaining gradients
        to the store."""
        if self._finished:
            return
        for name, p in self._copies.items():
            if p.requires_grad:
                self._sum_copies(name, p, self._shared[name])
        self.placed.root.pass_ended()
        self._finished = True

    def _sum_copies(self, name: str, p: torch.nn.Parameter, copies: SharedCopies) -> None:
        """Sum a shared parameter's gradient over all ranks that have a copy, in rank order and in
        fp32. The first rank of each stage keeps the sum and the others zero, so that all servers
        receive the same bits. Raises PeerError."""
        grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        flat = grad.view(-1)
        for start in range(0, flat.numel(), SUM_ELEMENTS):
            part = flat[start : start + SUM_ELEMENTS]
            terms = [torch.empty_like(part) for _ in range(copies.width)]
            try:
                dist.all_gather(terms, part.clone(), group=copies.group)
            except RuntimeError as error:
                who = f"{name!r} over {ranks_of(copies.group)}"
                what = f"step {self.steps_done + 1}: the sum of the copies of {who}"
                raise typed(error, what, copies.deadline_s) from error
            total = terms[0].float()
            for term in terms[1:]:
                total += term
            part.copy_(total)
        p.grad = grad if copies.replica == 0 else torch.zeros_like(grad)

    # state

    def extents(self) -> list[Extent]:
        """Return the extents that this rank provides: an equal share of each parameter. Waits for
        the commit of the previous step, so all ranks must call it."""
        self.placed.flush()
        sizes = ((spec.name, spec.numel) for spec in self.placed.params)
        return even_shares(sizes, self.placed.group.rank, self.width)

    def needed(self) -> list[Extent]:
        """Return the extents that `load` must receive: all on the stage's first rank, none on
        others."""
        if self.placed.group.rank:
            return []
        return [Extent(spec.name, 0, spec.numel) for spec in self.placed.params if spec.numel]

    def piece(self, extent: Extent) -> Piece:
        """Return a copy of the values and state of an extent. Call `extents` before, which waits
        for the previous step."""
        spec = self.placed.params[self._names[extent.name]]
        rule = self.placed.rules[spec.group] if spec.trainable else None
        whats = {VALUE: MASTER} | {key: key for key in (rule.arrays if rule else ())}
        out = {key: np.empty(extent.numel, np.float32) for key in whats}
        scalars: dict[str, float] = {}
        for chunk, i, span in self.placed.session.meta.where[extent.name]:
            last = span.origin + span.stop - span.start
            first, last = max(extent.start, span.origin), min(extent.stop, last)
            if first >= last:
                continue
            view = self._record_of(chunk)
            for key, what in whats.items():
                values = view.piece(what, i)[first - span.origin : last - span.origin]
                into = out[key][first - extent.start : last - extent.start]
                _widen(values, spec, into)
            scalars = {key: float(view.piece(key, i)[0]) for key in (rule.scalars if rule else ())}
        return Piece(extent, {key: torch.from_numpy(array) for key, array in out.items()}, scalars)

    def _record_of(self, chunk: Any) -> RecordView:
        """Return a chunk's record, from a cache of one record."""
        key = (self.steps_done, chunk.id)
        if self._record is None or self._record[:2] != key:
            view = self.placed.session.servers.record_of(chunk, "")
            self._record = (*key, view)
        return self._record[2]

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Replace the store's values and state by those of `pieces`, unless they are equal (Note
        "store commits").

        steps_done: the number of steps that the job has taken with these values. Raises StaleError
        if shared servers hold other values of the same step, StoreError if a piece is missing, and
        LoopError if the store cannot be overwritten.
        """
        placed = self.placed
        placed.flush()
        self._record = None
        same = placed.steps_done == steps_done
        staged = StagedPieces(placed.params, placed.rules, placed.scratch)
        for piece in pieces:
            same = same and self._holds(piece)
            staged.add(piece)
        first = placed.group.rank == 0
        if first:
            staged.check(f"the stage at step {steps_done}")
        if not same:
            self._refuse_other_values(steps_done)
            values, state = (staged.values(), staged.state()) if first else ({}, {})
            placed.take_values(steps_done, values, state)
        self._record = None

    def _refuse_other_values(self, steps_done: int) -> None:
        """Raise StaleError if shared servers are at the same step as the new values: only the first
        rank writes them, and other ranks would not notice the change."""
        if self.width > 1 and self.placed.steps_done == steps_done:
            raise StaleError(
                f"this stage's servers hold other values for step {steps_done} than the snapshot",
                hint="give this stage the servers of this run, or empty servers",
            )

    def _holds(self, piece: Piece) -> bool:
        own = self.piece(piece.extent)
        return (
            own.arrays.keys() == piece.arrays.keys()
            and dict(own.scalars) == dict(piece.scalars)
            and all(
                torch.equal(array.view(torch.int32), piece.arrays[key].view(torch.int32))
                for key, array in own.arrays.items()
            )
        )


class StagedPieces:
    """Values and optimizer state that arrive as pieces, in any order, in a scratch file, so that a
    stage larger than memory can be loaded.

    `params`: the store's parameters. `rules`: one rule per parameter group. `where`: the directory
    of the scratch file.
    """

    def __init__(self, params: Sequence[ParamSpec], rules: Sequence[Rule], where: Path) -> None:
        self._params, self._rules = params, rules
        self._index = {spec.name: i for i, spec in enumerate(params)}
        self._at = dict[tuple[int, str], int]()  # (parameter, array) -> byte offset in the file
        nbytes = 0
        for i, spec in enumerate(params):
            arrays = rules[spec.group].arrays if spec.trainable else ()
            for key in (VALUE, *arrays):
                self._at[i, key] = nbytes
                nbytes += round_up(spec.numel * 4, PAGE)
        self._scratch = Scratch(where, nbytes)
        self._received = list[Extent]()
        # by parameter index, only for parameters with state
        self._scalars = dict[int, Mapping[str, float]]()

    def add(self, piece: Piece) -> None:
        """Write a piece to the scratch file. Raises ForeignError if the piece has the state of
        another rule."""
        name, start = piece.extent.name, piece.extent.start
        index = self._index[name]
        spec = self._params[index]
        arrays: Sequence[str] = ()
        if spec.trainable and piece.has_state(self._rules[spec.group]):
            arrays = self._rules[spec.group].arrays
            self._scalars[index] = piece.scalars
        self._received.append(piece.extent)
        for key in (VALUE, *arrays):
            values = piece.arrays[key].numpy()
            self._scratch.write(values.view(np.uint8).data, self._at[index, key] + 4 * start)

    def check(self, who: str) -> None:
        """Raise StoreError if elements of a parameter are missing. who: the subject of the error's
        message."""
        needed = [Extent(spec.name, 0, spec.numel) for spec in self._params]
        check_covered(self._received, needed, who)

    def values(self) -> dict[int, torch.Tensor]:
        """Return the values by parameter index: fp32 if trainable, otherwise in the parameter's
        dtype."""
        out = {}
        for i, spec in enumerate(self._params):
            if spec.numel:
                whole = self._tensor(i, VALUE)
                out[i] = whole if spec.trainable else whole.to(DTYPES[spec.dtype])
        return out

    def state(self) -> dict[int, dict[str, torch.Tensor | float]]:
        """Return the optimizer state by parameter index, for parameters that have state."""
        out = dict[int, dict[str, torch.Tensor | float]]()
        for i, scalars in self._scalars.items():
            arrays = self._rules[self._params[i].group].arrays
            out[i] = {key: self._tensor(i, key) for key in arrays} | dict(scalars)
        return out

    def _tensor(self, index: int, key: str) -> torch.Tensor:
        spec, at = self._params[index], self._at[index, key]
        flat = torch.frombuffer(self._scratch.map, dtype=torch.float32, count=spec.numel, offset=at)
        return flat.view(spec.shape)


def for_mean(scale: float, width: int) -> float:
    """Return a factor for gradients so that, after servers divide their sum by `width`, they are
    multiplied by exactly `scale` (rounded to fp32 if necessary)."""
    if (scale * width) / width == scale or scale != scale:
        return scale * width
    return float(np.float32(scale)) * width


def _widen(values: np.ndarray[Any, Any], spec: ParamSpec, into: np.ndarray[Any, Any]) -> None:
    if values.dtype == into.dtype:
        np.copyto(into, values)
    elif spec.dtype in NUMPY and not spec.trainable and spec.dtype != "fp64":
        cast(values, spec.dtype, into, "fp32")
    else:
        raise ConfigError(
            f"frozen parameter {spec.name!r} is {spec.dtype}, which fp32 cannot represent exactly",
            hint="register the parameter as a buffer",
        )
