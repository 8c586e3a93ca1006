"""PlacedOptimizer: a real torch.optim.Optimizer over the user's own parameter groups, whose state is elsewhere.

A step: backward pushes each block's gradient; step() releases the updates (scaled by what clipping and loss scaling did
to the gradients' handles) and seals the step; it is committed while the next one computes.

Assumes: made by place(). Does NOT run rules or move bytes; node/worker.py does.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from roadtrain.errors import ForeignError, LoopError
from roadtrain.model import plain
from roadtrain.model.activations import Activations
from roadtrain.model.grads import PlacedGrad
from roadtrain.model.split import Split
from roadtrain.model.stream import Stream
from roadtrain.node.cluster import Cluster, Group
from roadtrain.node.engine import Engine
from roadtrain.spec.chunks import ChunkTable, ParamSpec
from roadtrain.trace import Stage


class PlacedOptimizer(torch.optim.Optimizer):
    """What `place` returns. `steps_done`: steps taken so far, over all runs; data goes on from there.
    `committed_step`: steps that no crash can lose any more."""

    _step_supports_amp_scaling = True  # GradScaler hands over its scale; an inf or nan skips the step exactly

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parts: Split, base: ChunkTable,
        engine: Engine | Cluster, backwards_per_step: int | None, extra: dict[str, Any],
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._model, self._table, self._engine, self._extra = model, base, engine, extra
        self._given: Any = optimizer  # schedulers made before place() watch it; the two share their groups
        self._parts, self._worker = parts, engine.worker
        # the model's stream is given this object as its lender, the gradients' handles as their book
        self.borrow, self.give_back = self._worker.borrow, self._worker.give_back
        self.gradient_buffer, self.sum_squares = self._worker.gradient_buffer, self._worker.sum_squares
        self._params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self._index = {p: i for i, p in enumerate(self._params)}
        self._of_block = [[p for _, p in part.params if p.requires_grad] for part in (parts.root, *parts.blocks)]
        self._promise = backwards_per_step
        self._passes = 0
        self._hypers: dict[int, tuple[float, ...]] | None = None  # used by updates that have begun in this step
        self.steps_done = engine.step
        self.group = engine.group if isinstance(engine, Cluster) else Group()  # which of the workers this is
        self._due: int | None = None  # a sealed step whose state of the job is not captured yet
        self._norm: float | tuple[list[int], float] = math.nan  # or, until asked for: (blocks, loss scaling undone)
        self._stream: Stream | None = None
        self._hooks: list[Any] = []
        self._root_handles: dict[nn.Parameter, PlacedGrad] = {}  # several workers: while a pass computes the next one
        self._closed = False
        me = weakref.ref(self)
        self._at_exit = lambda: _close_quietly(me())
        atexit.register(self._at_exit)

    # what else the model's stream calls

    def push(self, block: int, buffer: torch.Tensor, present: Sequence[int]) -> None:
        state = self._worker.blocks[block]
        fresh = all(p.grad is None for p in self._of_block[block])
        if not fresh and not state.held and state.released_in != self.steps_done + 1:
            raise LoopError(
                f"block '{self._table.blocks[block].name}' got a gradient while its last one was not cleared",
                hint="call optimizer.zero_grad() once a step",
            )
        if not fresh and self._worker.twin:
            raise LoopError("error feedback keeps one residual a step, and this is its second backward pass",
                            hint="one backward pass before each step(), or error_feedback=False")
        assert self._stream is not None
        whole = self._promise is not None and self._passes + 1 == self._promise and not self._stream.pending(block)
        if whole and self._hypers is None:
            self._hypers = self._now_hypers()
        at_once: dict[str, Any] = {"step": self.steps_done + 1, "hypers": self._hypers} if whole else {}
        self._worker.push_block(block, buffer, present, fresh=fresh, **at_once)

    def pass_ended(self) -> None:
        self._passes += 1
        if self._worker.workers > 1:  # the root's gradients are summed over workers too, so they leave like a block's
            self._push_root()
            for p in self._of_block[0]:
                if p.grad is not None and p in self._index:
                    spec = self._table.params[self._index[p]]
                    self._root_handles.setdefault(p, PlacedGrad(p, self._index[p], self, spec.name))
                if p in self._root_handles:
                    p.grad = self._root_handles[p]

    # torch.optim.Optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients that step() has not used are dropped."""
        self._root_handles.clear()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_engine"):
            raise LoopError("parameter groups are fixed once placed", hint="add the group before place()")
        super().add_param_group(param_group)

    def _now_hypers(self) -> dict[int, tuple[float, ...]]:
        pairs = zip(self._engine.layout.rules, self.param_groups)  # rules of residuals, behind them, take none
        return {i: rule.hyper(group) for i, (rule, group) in enumerate(pairs)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the updates of this step and seal it; they run while the next forward does. With GradScaler, a step
        with inf or nan is skipped: nothing changes but the number of steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._capture()
        step, unscale, skip = self.steps_done + 1, *amp_of(self)
        hypers = self._now_hypers()
        self._check_promise(hypers, unscale, skip)
        self._push_root()
        states = self._worker.blocks[: len(self._table.blocks)]
        several = self._worker.workers > 1
        held = [b for b, s in enumerate(states) if s.held or s.released_in == step or several]
        for block in held:
            if states[block].released_in == step:
                continue  # in backward
            if skip and not several:
                self._worker.forget(block)
            else:
                self._worker.release(block, step, hypers, lambda i: None if skip else self._scale(i, unscale))
        self._worker.seal(step)
        self._norm = held, abs(unscale)
        self.steps_done, self._due, self._hypers, self._passes = step, step, None, 0
        self._given._opt_called = True
        return loss

    def _scale(self, param: int, unscale: float) -> float | None:
        p = self._params[param]
        grad = self._root_handles.get(p) if p.grad is None else p.grad
        if grad is None:
            return None
        return (grad.scale if isinstance(grad, PlacedGrad) else 1.0) * unscale

    def _check_promise(self, hypers: Mapping[int, tuple[float, ...]], unscale: float, skip: bool) -> None:
        if self._hypers is None:
            return
        scaled = any(isinstance(p.grad, PlacedGrad) and p.grad.scale != 1.0 for p in self._params)
        if skip or unscale != 1.0 or scaled or hypers != self._hypers:
            raise LoopError(
                "updates began in backward, but then gradients were scaled or the learning rate changed",
                hint="leave backwards_per_step out of place(): updates then wait for step()",
            )

    def _push_root(self) -> None:
        """The root block's gradients are ordinary p.grad; they leave here, as one flat piece."""
        params = [(self._index[p], p.grad) for p in self._of_block[0]
                  if p.grad is not None and p in self._index and not isinstance(p.grad, PlacedGrad)]
        grads = {i: g for i, g in params if self._table.params[i].trainable}
        if not grads:
            return
        buffer = self._worker.gradient_buffer(0)
        assert self._stream is not None
        self._stream.root.lay_out(buffer, grads)
        fresh = not self._root_handles
        if not fresh and not self._worker.blocks[0].held:
            raise LoopError("the root block got a gradient while its last one was not cleared",
                            hint="call optimizer.zero_grad() once a step")
        self._worker.push_block(0, buffer, list(grads), fresh=fresh)

    # durability

    def forward_begins(self) -> None:
        """Before the model computes: the last step's state of the job is final, and the root block must be new."""
        if torch.is_grad_enabled():
            self._capture()
            for p in self._root_handles:
                p.grad = None  # this pass computes a tensor; it is added where the others are
        if self._worker.refresh_root():
            for _, p in self._parts.root.params:
                torch.autograd.graph.increment_version(p)

    def _capture(self) -> None:
        if self._due is not None:
            step, self._due = self._due, None
            self._worker.blob(step, self.job_state())

    def job_state(self) -> bytes:
        """What else a step consists of: RNG, buffers, hyperparameters, `extra`. Raises ConfigError (model/plain.py)."""
        kind, keys, position, has_gauss, cached = np.random.get_state()
        persistent = self._model.state_dict(keep_vars=True)
        device = self._worker.root.tensor.device
        state = {
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],  # of this worker's own device
            "python": random.getstate(),
            "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
            "buffers": {n: b for n, b in self._model.named_buffers() if n in persistent},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
            "extra": {name: thing.state_dict() for name, thing in self._extra.items()},
        }
        return plain.encode(state)

    def load_job_state(self, blob: bytes) -> None:
        state = plain.decode(blob)
        known = {"torch", "cuda", "python", "numpy", "buffers", "groups", "extra"}
        if not isinstance(state, dict) or not known <= state.keys():
            raise ForeignError(f"what was committed with step {self.steps_done} is no state of a job: it is a "
                               f"{type(state).__name__} without all of {', '.join(sorted(known))}")
        torch.set_rng_state(state["torch"])
        device = self._worker.root.tensor.device
        if state["cuda"] and device.type == "cuda":  # the first edition's: those of all devices that the process saw
            torch.cuda.set_rng_state(state["cuda"][min(device.index or 0, len(state["cuda"]) - 1)], device)
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        named = dict(self._model.named_buffers())
        for name, value in state["buffers"].items():
            named[name].copy_(value)
        for group, saved in zip(self.param_groups, state["groups"]):
            group.update({key: value.to(group[key].device) if isinstance(value, torch.Tensor) and
                          isinstance(group.get(key), torch.Tensor) else value for key, value in saved.items()})
        for name, thing in self._extra.items():
            if name in state["extra"]:
                thing.load_state_dict(state["extra"][name])

    @property
    def committed_step(self) -> int:
        return self._worker.ledger.committed

    def flush(self) -> None:
        """Wait until every step taken is committed."""
        self._capture()
        self._worker.wait_committed(self.steps_done)

    # what people ask

    @property
    def params(self) -> Sequence[ParamSpec]:
        """What `read` can be asked for."""
        return self._table.params

    def grad_norm(self) -> float:
        """Of the last step's gradient: all parameters, before clipping, after loss scaling is undone. Waits until the
        servers have summed it."""
        if isinstance(self._norm, tuple):
            blocks, unscale = self._norm
            squares = sum(sum(self._worker.block_sums(b, sealed=True).values()) for b in blocks)
            self._norm = math.sqrt(squares) * unscale if math.isfinite(squares) else math.inf
        return self._norm

    def stages(self) -> dict[str, Stage]:
        return self._engine.stages.take()

    def memory(self) -> dict[str, int]:
        """Bytes: what roadtrain's buffers take now, and what plain training of this model needs."""
        plain = 0
        for chunk in self._table.chunks:
            n = sum(s.stop - s.start for s in chunk.spans)
            plain += chunk.public_nbytes * (2 if chunk.trainable else 1)  # parameters, gradients
            if chunk.trainable:
                plain += n * 4 * (len(self._engine.layout.rules[chunk.group].arrays) + (chunk.dtype != "fp32"))
        return {"resident": self._engine.nbytes(), "plain": plain}

    def read(self, name: str, what: str = "master") -> np.ndarray:
        """A parameter's fp32 master values or one of its state arrays, shaped like the parameter; or a state scalar."""
        self.flush()
        return self._engine.read(name, what)

    def state_dict(self) -> dict[str, Any]:
        """torch's form, gathered from the servers into memory: for models small enough. Saving is not needed: the store
        is the checkpoint."""
        self.flush()
        state, groups, at = {}, [], 0
        for i, group in enumerate(self.param_groups):
            rule = self._engine.layout.rules[i]
            for number, p in enumerate(group["params"], at):
                spec = self._table.params[self._index[p]]
                if self.steps_done and spec.trainable:
                    found = {key: torch.from_numpy(self._engine.read(spec.name, key))
                             for key in (*rule.arrays, *rule.scalars)}
                    state[number] = found | {key: found[key].float()[0] for key in rule.scalars}
            count = len(group["params"])
            groups.append({k: v for k, v in group.items() if k != "params"} | {"params": list(range(at, at + count))})
            at += count
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        raise LoopError("a placed optimizer's state is in its store, no update would read this one",
                        hint="place() with that store resumes it")

    def close(self) -> None:
        """Commit what was taken, end all threads, give the model its own forwards back. The model's block parameters
        stay NaN: place it again, or export the store."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self.flush()
            self.grad_norm()
        finally:
            for hook in self._hooks:
                hook.remove()
            if self._stream is not None:
                self._stream.detach()
                self._activations.close()
            self._engine.close()

    def __enter__(self) -> PlacedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self, stream: Stream, activations: Activations) -> None:
        """Called once by place()."""
        self._stream = stream
        self._hooks.append(self._model.register_forward_pre_hook(lambda *_: self.forward_begins()))
        for module in {m for m in self._model.modules() if any(p in self._index for p in m.parameters(recurse=False))}:
            if any(p is q for p in module.parameters(recurse=False) for _, q in self._parts.root.params):
                self._hooks.append(module.register_forward_pre_hook(lambda *_: self.forward_begins()))
        self._activations = activations


def amp_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """(what gradients must be multiplied by, whether the step is skipped), as GradScaler.step left them there."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    unscale = 1.0 if scale is None else 1.0 / float(scale)
    return unscale, found is not None and bool(float(found))


def _close_quietly(placed: PlacedOptimizer | None) -> None:
    """At exit: commit what can be committed. What failed has been raised where it happened."""
    if placed is not None:
        with contextlib.suppress(Exception):
            placed.close()
