"""A model of which this rank has a stage: the model's own forward runs, from the cut before the
stage to the cut behind it.

Blocks of other stages are replaced by stubs without parameters, parameters of what lies outside the
blocks and is used elsewhere by NaN that takes no memory. The stub of the block before the stage
returns what came over the cut; the stage's last block ends the forward with what it returned. What
the model computes before the first stub's turn (masks, positions) it computes on every stage.
Modules and parameters keep their names, so that optimizers, snapshots and users find them.

A block's random numbers (dropout) start from the job's seed, the step, the micro-batch and the
block, so they do not depend on how the model is cut or on which replica runs the micro-batch.

Assumes: the stage's parameters have their values, or get them before the first `run`.
Does NOT communicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from roadtrain.errors import LoopError, ModelError
from roadtrain.options.check import check_options
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.streaming.released import released_value


@dataclass(frozen=True)
class MicroBatch:
    """What the model is called with, and what the loss needs beside its result."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    target: Any = None

    def __post_init__(self) -> None:
        check_options(MicroBatch, vars(self))


@dataclass(frozen=True)
class RandomStart:
    """The start of every random stream of one micro-batch; `micro` counts over all replicas."""

    seed: int
    step: int
    micro: int

    def block(self, number: int) -> None:
        """Seed torch for block `number` and what runs between it and the block before it."""
        key = f"{self.seed} {self.step} {self.micro} {number}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))

    def batch(self) -> None:
        """Seed torch for whatever produces the micro-batch, alike on every stage."""
        self.block(-1)


class _SegmentEnds(BaseException):
    """Leaves the model's forward behind the segment's last block. No `except Exception` of a
    model's own code keeps it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _Running:
    """A forward under way."""

    segment: Segment
    received: tuple[torch.Tensor, ...]
    random: RandomStart | None

    def seed(self, number: int) -> None:
        if self.random is not None:
            self.random.block(number)


class _Stub(nn.Module):
    """Stands where a block of another stage stood. It has the block's plain attributes, which
    models read (as the kind of attention of a layer)."""

    def __init__(self, block: nn.Module, value: Callable[[], Any]) -> None:
        super().__init__()
        own = {"training", *self.__dict__}
        for name, attribute in block.__dict__.items():
            if name not in own and not name.startswith("_") and name != "forward":
                self.__dict__[name] = attribute
        self.train(block.training)
        self._value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._value()


class StageModel:
    """`model` cut down to `segments`, which this rank runs. `names`: its parameters, as in the
    whole model."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        segments: Sequence[Segment],
        device: torch.device | str = "cpu",
    ) -> None:
        """Changes `model` in place; it will compute in the dtype of `cuts`. Raises ModelError where
        it cannot be cut so; nothing has changed then."""
        self.model, self.cuts, self.segments = model, cuts, tuple(segments)
        self.device = torch.device(device)
        self.names = frozenset().union(*(cuts.parameters(s) for s in segments))
        self._running: _Running | None = None
        self._own_forwards: dict[nn.Module, Any] = {}
        self._blocks = {i: model.get_submodule(name) for i, name in enumerate(cuts.blocks)}
        self.whole = dict(model.named_parameters())  # those of other stages hold no values
        self.shapes = {name: tuple(p.shape) for name, p in self.whole.items()}
        self._whole_parameters = {m: dict(m._parameters) for m in model.modules()}
        self._drop_parameters()
        self._drop_blocks()

    @property
    def own(self) -> list[int]:
        """Numbers of the blocks that this rank has."""
        return [i for s in self.segments for i in range(s.begin, s.stop)]

    @property
    def own_modules(self) -> list[nn.Module]:
        return [self._blocks[i] for i in self.own]

    @property
    def own_names(self) -> list[str]:
        return [self.cuts.blocks[i] for i in self.own]

    def runs_first(self, module: str) -> bool:
        """Whether this is the first stage that runs the module of that name: one of an own block,
        or one outside of blocks. What no forward calls is the first stage's."""
        if any(f"{module}.".startswith(f"{block}.") for block in self.own_names):
            return True
        at, last = self.cuts.blocks_before.get(module, 0), len(self.cuts.blocks)
        return any(s.begin <= at < s.stop or at == s.stop == last for s in self.segments)

    def attach(self) -> None:
        """Take over the blocks' forwards; after whatever else wraps them (`place` does)."""
        for number in self.own:
            block = self._blocks[number]
            original = block.forward
            self._own_forwards[block] = block.__dict__.get("forward")
            block.forward = partial(self._run_block, number, original)

    def detach(self) -> None:
        """Give the blocks the forwards back that they had."""
        for block, before in self._own_forwards.items():
            block.__dict__.pop("forward", None)
            if before is not None:
                block.forward = before
        self._own_forwards.clear()

    def restore(self) -> None:
        """The model has all blocks and parameters again, those of other stages without values; so
        it can be cut anew."""
        self.detach()
        for number, block in self._blocks.items():
            self._replace_block(number, block)
        for module, parameters in self._whole_parameters.items():
            for key in parameters.keys() - module._parameters.keys():
                delattr(module, key)
            module._parameters.clear()
            module._parameters.update(parameters)

    def run(
        self,
        segment: Segment,
        received: Sequence[torch.Tensor],
        batch: MicroBatch,
        random: RandomStart | None = None,
    ) -> tuple[bool, Any]:
        """The forward of `segment`. received: what crossed the cut before it, in its own dtypes.
        random: where random numbers start; None leaves torch's random state alone.
        Returns whether the model's forward came to its end, and what it returned; else what the
        segment's last block returned."""
        self._running = _Running(segment, tuple(received), random)
        try:
            self._running.seed(0)
            return True, self.model(*batch.args, **(batch.kwargs or {}))
        except _SegmentEnds as end:
            return False, end.value
        finally:
            self._running = None

    def _run_block(self, number: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # in backward: a checkpoint's recomputation
            return original(*args, **kwargs)
        running = self._now()
        segment = running.segment
        if number < segment.begin:
            return self._before(number)
        value = original(*args, **kwargs)
        running.seed(number + 1)
        if number == segment.stop - 1 and segment.stop < len(self.cuts.blocks):
            raise _SegmentEnds(value)
        return value

    def _before(self, number: int) -> Any:
        """What block `number`, before the running segment, is taken to return."""
        running, returned = self._now(), self.cuts.returned[number]
        if number >= running.segment.stop:
            raise ModelError(
                f"block {self.cuts.blocks[number]!r} ran before {running.segment}: the order of"
                " blocks changes between micro-batches",
                hint="a pipeline needs a forward that runs the same blocks in the same order",
            )
        if number == running.segment.begin - 1:
            running.seed(number + 1)
            return returned.rebuild(running.received)
        return returned.rebuild(
            [released_value(t.shape, t.dtype, self.device) for t in returned.shapes]
        )

    def _now(self) -> _Running:
        if self._running is None:
            names = ", ".join(map(str, self.segments))
            raise LoopError(
                f"this rank has only {names} of the model, which was called as a whole",
                hint="train it with the pipeline's step(), which runs all stages",
            )
        return self._running

    def _drop_blocks(self) -> None:
        for number in set(self._blocks) - set(self.own):
            stub = _Stub(self._blocks[number], partial(self._before, number))
            self._replace_block(number, stub)

    def _replace_block(self, number: int, module: nn.Module) -> None:
        above, _, key = self.cuts.blocks[number].rpartition(".")
        setattr(self.model.get_submodule(above), key, module)

    def _drop_parameters(self) -> None:
        """Those of modules that stay and that no own segment uses."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for module in self.model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None and names[id(p)] not in self.names:
                    del module._parameters[key]
                    dtype = self.cuts.dtype_of(p)
                    setattr(module, key, released_value(p.shape, dtype, self.device))
