"""StageModel: a model that is reduced to one stage: its own forward runs from the cut (boundary
between stages) before the stage to the cut after it. Does NOT communicate.

Blocks of other stages are replaced by stubs, and parameters that only other stages use by NaN
values that take no memory. Code before the first block (masks, positions) runs on every stage.
Modules and parameters keep their names.

A block's random numbers (dropout) are seeded with the job's seed, the step, the micro-batch and the
block, so they do not depend on cuts or replicas. The stage's parameters must have values before the
first `run`.
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
from roadtrain.options.check import Checked
from roadtrain.stages.cuts import Cuts, Segment
from roadtrain.streaming.released import released_value


@dataclass(frozen=True)
class MicroBatch(Checked):
    """The arguments of one call of the model, and the target of the loss.

    Args:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: The target of the loss. The loss function gets the model's result and this
            micro-batch.

    Raises:
        ConfigError: A field has the wrong type.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    target: Any = None


@dataclass(frozen=True)
class RandomStart:
    """The seeds of all random numbers of one micro-batch. `micro`: its number, over all
    replicas."""

    seed: int
    step: int
    micro: int

    def block(self, number: int) -> None:
        """Seed torch for block `number` and the code before it."""
        key = f"{self.seed} {self.step} {self.micro} {number}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))

    def batch(self) -> None:
        """Seed torch for the code that produces the micro-batch, the same on every stage."""
        self.block(-1)


class _SegmentEnds(BaseException):
    """The exception that ends the forward after the segment; no `except Exception` of a model
    catches it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _Running:
    """The state of a forward in progress."""

    segment: Segment
    received: tuple[torch.Tensor, ...]
    random: RandomStart | None

    def seed(self, number: int) -> None:
        if self.random is not None:
            self.random.block(number)


class _Stub(nn.Module):
    """The replacement of a block of another stage, with the block's plain attributes, which models
    read."""

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
    """A model that is reduced to the segments (ranges of consecutive blocks) of this rank. `names`:
    the names of the parameters that these segments use, as in the whole model."""

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        segments: Sequence[Segment],
        device: torch.device | str = "cpu",
    ) -> None:
        """Reduce `model` in place to `segments`. If it cannot be cut this way, raises ModelError
        and leaves the model unchanged."""
        self.model, self.cuts, self.segments = model, cuts, tuple(segments)
        self.device = torch.device(device)
        self.names = frozenset().union(*(cuts.parameters(s) for s in segments))
        self._running: _Running | None = None
        self._own_forwards: dict[nn.Module, Any] = {}
        self._blocks = {i: model.get_submodule(name) for i, name in enumerate(cuts.blocks)}
        # this rank's blocks: their indices in the model, their modules and their names
        self.own = [i for s in self.segments for i in range(s.begin, s.stop)]
        self.own_modules = [self._blocks[i] for i in self.own]
        self.own_names = [cuts.blocks[i] for i in self.own]
        # all parameters; those of other stages have no values
        self.whole = dict(model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.whole.items()}
        self._whole_parameters = {m: dict(m._parameters) for m in model.modules()}
        self._drop_parameters()
        self._drop_blocks()

    def runs_first(self, module: str) -> bool:
        """Return whether this is the first stage that runs `module`, or the first stage if no
        forward calls it. The module must be inside a block of this stage, or outside of all
        blocks."""
        if any(f"{module}.".startswith(f"{block}.") for block in self.own_names):
            return True
        at, last = self.cuts.blocks_before.get(module, 0), len(self.cuts.blocks)
        return any(s.begin <= at < s.stop or at == s.stop == last for s in self.segments)

    def attach(self) -> None:
        """Wrap the forwards of this rank's blocks for `run`. Call this after other functions that
        wrap forwards, such as `place`."""
        for number in self.own:
            block = self._blocks[number]
            original = block.forward
            self._own_forwards[block] = block.__dict__.get("forward")
            block.forward = partial(self._run_block, number, original)

    def detach(self) -> None:
        """Restore the blocks' own forwards."""
        for block, before in self._own_forwards.items():
            block.__dict__.pop("forward", None)
            if before is not None:
                block.forward = before
        self._own_forwards.clear()

    def restore(self) -> None:
        """Put all blocks and parameters back into the model, so that it can be cut again.
        Parameters of other stages still have no values."""
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
        """Run the forward of `segment`. Return (True, the model's result) for the last segment of
        the model, otherwise (False, the result of the segment's last block).

        received: the tensors that crossed the cut before the segment, in the model's dtypes.
        random: the seeds of random numbers; None: torch is not seeded.
        """
        self._running = _Running(segment, tuple(received), random)
        try:
            self._running.seed(0)
            return True, self.model(*batch.args, **(batch.kwargs or {}))
        except _SegmentEnds as end:
            return False, end.value
        finally:
            self._running = None

    def _run_block(self, number: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        # true in a backward, in which checkpointing runs the block again
        if torch._C._current_graph_task_id() != -1:
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
        """Return the received tensors as the result of the last block before the running segment,
        and placeholders for earlier blocks."""
        running, returned = self._now(), self.cuts.returned[number]
        if number >= running.segment.stop:
            raise ModelError(
                f"block {self.cuts.blocks[number]!r} ran before {running.segment}: the order of"
                " blocks changes between micro-batches",
                hint="make the forward run the same blocks in the same order each time",
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
                f"this rank has only {names} of the model, but the whole model was called",
                hint="train the model with the pipeline's step(), which runs all stages",
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
        """Put placeholders in place of all parameters that no segment of this rank uses."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for module in self.model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None and names[id(p)] not in self.names:
                    del module._parameters[key]
                    dtype = self.cuts.dtype_of(p)
                    setattr(module, key, released_value(p.shape, dtype, self.device))
