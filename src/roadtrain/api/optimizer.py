"""PlacedOptimizer: a real torch.optim.Optimizer over the user's own parameter groups, whose state
is elsewhere.

A step: backward pushes each block's gradient; step() releases the updates (scaled by what clipping
and loss scaling did to the gradients' handles) and seals the step; it is committed while the next
one computes.

Assumes: made by place(). Does NOT run rules or move bytes; runtime/worker.py does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import random
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from roadtrain.api import optimizer_states
from roadtrain.api.state_dicts import ModelStates, Pieces, Values
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.errors import ForeignError, GoneError, LoopError
from roadtrain.runtime.local_servers import pieces_of
from roadtrain.runtime.session import JobSession
from roadtrain.runtime.store_plan import StorePlan
from roadtrain.runtime.trace import StageTotals
from roadtrain.storage.generation import OpenedStore, open_store
from roadtrain.streaming import plain
from roadtrain.streaming.activations import Activations
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.released import (
    check_unchanged,
    is_behind,
    is_called_by_dynamo,
    set_behind,
    set_fetched,
    set_released,
)
from roadtrain.streaming.split import Split
from roadtrain.streaming.stream import BlockStream


class PlacedOptimizer(torch.optim.Optimizer):
    """What `place` returns. `steps_done`: steps taken so far, over all runs; data goes on from
    there.
    `committed_step`: steps that no crash can lose any more."""

    # GradScaler hands over its scale; an inf or nan skips the step exactly
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Split,
        base: ChunkTable,
        engine: JobSession,
        backwards_per_step: int | None,
        extra: dict[str, Any],
        report: Callable[[str], None] = print,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = _Elsewhere(dict)
        self._model, self._table, self._engine, self._extra = model, base, engine, extra
        # schedulers made before place() watch it; the two share their groups
        self._given: Any = optimizer
        self._parts, self._worker = parts, engine.worker
        # the model's stream is given this object as its lender, the gradients' handles as their
        # book
        self.release = self._worker.release
        self.gradient_buffer, self.sum_squares = (
            self._worker.gradient_buffer,
            self._worker.sum_squares,
        )
        self._params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self._index = {p: i for i, p in enumerate(self._params)}
        self._of_block = [
            [p for _, p in part.params if p.requires_grad] for part in (parts.root, *parts.blocks)
        ]
        self._promise = backwards_per_step
        self._passes = 0
        # used by updates that have begun in this step
        self._hyperparameters: dict[int, tuple[float, ...]] | None = None
        self.steps_done = engine.step
        # which of the workers this is
        self.group = engine.group
        self._due: int | None = None  # a sealed step whose state of the job is not captured yet
        # or, until asked for: (blocks, loss scaling undone)
        self._norm: float | tuple[list[int], float] = math.nan
        self._stream: BlockStream | None = None
        self._hooks: list[Any] = []
        # the model is: a root parameter then keeps its class, which is guarded
        self._compiled = False
        self._root_versions: list[int] = []  # of the root's parameters, as of their last values
        # several workers: while a pass computes the next one
        self._root_handles: dict[nn.Parameter, PlacedGrad] = {}
        self._closed = self._abandoned = False
        self._report = report
        self._said_ram = False  # that a small state refers to what ends with this process
        # what state_dict() gives where it is not said, once a step was taken here
        self.whole_states = False
        self._begun_at = engine.step
        self._history = ""  # another one after each time that other values were loaded
        self._writing = False  # what was loaded is on its way to the store
        self._reopened: Pieces | None = None  # of a closed store, while it is read
        where = engine.store_plan.directories
        self._states = ModelStates(
            model, self._params, base.params, self, where[0] if where else None, report
        )
        me = weakref.ref(self)
        self._at_exit = lambda: _close_quietly(me())
        atexit.register(self._at_exit)

    # what else the model's stream calls

    def fetch(self, block: int) -> tuple[torch.Tensor, int]:
        self.write_staged()
        return self._worker.fetch(block)

    def push(self, block: int, buffer: torch.Tensor, present: Sequence[int]) -> None:
        state = self._worker.blocks[block]
        fresh = all(p.grad is None for p in self._of_block[block])
        if not fresh and not state.held and not state.updated:
            raise LoopError(
                f"block '{self._table.blocks[block].name}' got a gradient while its last one was"
                " not cleared",
                hint="call optimizer.zero_grad() once a step",
            )
        if not fresh and self._worker.residual_block:
            raise LoopError(
                "error feedback keeps one residual a step, and this is its second backward pass",
                hint="one backward pass before each step(), or error_feedback=False",
            )
        assert self._stream is not None
        whole = (
            self._promise is not None
            and self._passes + 1 == self._promise
            and not self._stream.pending(block)
        )
        if whole and self._hyperparameters is None:
            self._states.settle()
            self._hyperparameters = self._current_hyperparameters()
        at_once: dict[str, Any] = (
            {"step": self.steps_done + 1, "hyperparameters": self._hyperparameters} if whole else {}
        )
        self._worker.push_block(block, buffer, present, fresh=fresh, **at_once)

    def pass_ended(self) -> None:
        self._passes += 1
        # the root's gradients are summed over workers too, so they leave like a block's
        if self._worker.workers > 1:
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
            raise LoopError(
                "parameter groups are fixed once placed", hint="add the group before place()"
            )
        super().add_param_group(param_group)

    def _current_hyperparameters(self) -> dict[int, tuple[float, ...]]:
        # rules of residuals, behind them, take none
        pairs = zip(self._engine.store_plan.rules, self.param_groups)
        return {i: rule.hyper(group) for i, (rule, group) in enumerate(pairs)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """ApplyUpdate the updates of this step and seal it; they run while the next forward does.
        With GradScaler, a step with inf or nan is skipped: nothing changes but the number of
        steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.write_staged()
        if self._hyperparameters is None:
            self._states.settle()
        self._check_gradients()
        self._capture()
        step, unscale, skip = self.steps_done + 1, *amp_of(self)
        hyperparameters = self._current_hyperparameters()
        self._check_promise(hyperparameters, unscale, skip)
        self._push_root()
        states = self._worker.blocks[: len(self._table.blocks)]
        several = self._worker.workers > 1
        held = [b for b, s in enumerate(states) if s.held or s.updated or several]
        for block in held:
            if states[block].updated:
                continue  # in backward
            if skip and not several:
                self._worker.forget(block)
            else:
                self._worker.apply_update(
                    block,
                    step,
                    hyperparameters,
                    lambda i: None if skip else self._scale(i, unscale),
                )
        self._worker.seal(step)
        self._norm = held, abs(unscale)
        self.steps_done, self._due, self._hyperparameters, self._passes = step, step, None, 0
        self._given._opt_called = True
        self._root_handles.clear()  # model.zero_grad() does not tell us
        if self._worker.root_is_old and not self._compiled:
            # until the next forward, or until somebody reads one
            for _, p in self._parts.root.params:
                set_behind(p, self._refresh_root)
        return loss

    def _scale(self, param: int, unscale: float) -> float | None:
        p = self._params[param]
        grad = self._root_handles.get(p) if p.grad is None else p.grad
        if grad is None:
            return None
        return (grad.scale if isinstance(grad, PlacedGrad) else 1.0) * unscale

    def _check_gradients(self) -> None:
        for p in itertools.chain.from_iterable(self._of_block[1:]):
            if p.grad is not None and not isinstance(p.grad, PlacedGrad):
                raise LoopError(
                    f"the gradient of {self._table.params[self._index[p]].name!r} was set by hand,"
                    " and would not reach its server",
                    hint="gradients of blocks come from backward()",
                )

    def _check_promise(
        self, hyperparameters: Mapping[int, tuple[float, ...]], unscale: float, skip: bool
    ) -> None:
        if self._hyperparameters is None:
            return
        scaled = any(isinstance(p.grad, PlacedGrad) and p.grad.scale != 1.0 for p in self._params)
        if skip or unscale != 1.0 or scaled or hyperparameters != self._hyperparameters:
            raise LoopError(
                "updates began in backward, but then gradients were scaled or the learning rate"
                " changed",
                hint="leave backwards_per_step out of place(): updates then wait for step()",
            )

    def _push_root(self) -> None:
        """The root block's gradients are ordinary p.grad; they leave here, as one flat piece."""
        params = [
            (self._index[p], p.grad)
            for p in self._of_block[0]
            if p.grad is not None and p in self._index and not isinstance(p.grad, PlacedGrad)
        ]
        grads = {i: g for i, g in params if self._table.params[i].trainable}
        if not grads:
            return
        buffer = self._worker.gradient_buffer(0)
        assert self._stream is not None
        self._stream.root.lay_out(buffer, grads)
        fresh = not self._root_handles
        if not fresh and not self._worker.blocks[0].held:
            raise LoopError(
                "the root block got a gradient while its last one was not cleared",
                hint="call optimizer.zero_grad() once a step",
            )
        self._worker.push_block(0, buffer, list(grads), fresh=fresh)

    # durability

    def forward_begins(self) -> None:
        """Before the model computes: the last step's state of the job is final, and the root
        block must be new."""
        self.write_staged()
        if torch.is_grad_enabled():
            self._capture()
            for p in self._root_handles:
                p.grad = None  # this pass computes a tensor; it is added where the others are
        self._refresh_root()

    @torch.compiler.disable
    def _pass_begins(self) -> None:
        """Before the whole model computes."""
        self._compiled = self._compiled or is_called_by_dynamo()
        self._check_root()
        if torch.is_grad_enabled():
            self._check_no_strangers()
        self.forward_begins()

    def _check_no_strangers(self) -> None:
        for name, p in self._model.named_parameters():
            if p.requires_grad and p not in self._index:
                raise LoopError(
                    f"parameter {name!r} came into the model after place(): it would not be trained"
                    " as it should",
                    hint=(
                        "add adapters and resize embeddings before place(), or place the model"
                        " again"
                    ),
                )

    def _refresh_root(self) -> None:
        """Called before every module of the root block: cheap where nothing is new."""
        if not self._worker.root_is_old and self._root_versions:
            return
        self._check_root()
        fetched = self._worker.refresh_root()
        for _, p in self._parts.root.params:
            set_fetched(p)
            if fetched:
                torch.autograd.graph.increment_version(p)
        self._root_versions = [p._version for _, p in self._parts.root.params]

    def _check_root(self) -> None:
        if self._root_versions:
            check_unchanged(self._parts.root.params, self._root_versions)

    def _capture(self) -> None:
        if self._due is not None:
            step, self._due = self._due, None
            self._worker.blob(step, self.job_state())

    def job_state(self) -> bytes:
        """What else a step consists of: RNG, buffers, hyperparameters, `extra`. Raises
        ConfigError (streaming/plain.py)."""
        kind, keys, position, has_gauss, cached = np.random.get_state()
        persistent = persistent_buffers(self._model)
        device = self._worker.root.tensor.device
        state = {
            "torch": torch.get_rng_state(),
            # of this worker's own device
            "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
            "python": random.getstate(),
            "numpy": [
                str(kind),
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                position,
                has_gauss,
                cached,
            ],
            "buffers": persistent,
            "history": self._history,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
            "extra": {name: thing.state_dict() for name, thing in self._extra.items()},
        }
        return plain.encode(state)

    def load_job_state(self, blob: bytes) -> None:
        state = plain.decode(blob)
        known = {"torch", "cuda", "python", "numpy", "buffers", "groups", "extra"}
        if not isinstance(state, dict) or not known <= state.keys():
            raise ForeignError(
                f"what was committed with step {self.steps_done} is no state of a job: it is a "
                f"{type(state).__name__} without all of {', '.join(sorted(known))}"
            )
        torch.set_rng_state(state["torch"])
        device = self._worker.root.tensor.device
        # the first edition's: those of all devices that the process saw
        if state["cuda"] and device.type == "cuda":
            torch.cuda.set_rng_state(
                state["cuda"][min(device.index or 0, len(state["cuda"]) - 1)], device
            )
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        named = dict(self._model.named_buffers())
        for name, value in state["buffers"].items():
            named[name].copy_(value)
        optimizer_states.take_groups(self, {"param_groups": state["groups"]})
        self._history = state.get("history", "")
        for name, thing in self._extra.items():
            if name in state["extra"]:
                thing.load_state_dict(state["extra"][name])

    @property
    def committed_step(self) -> int:
        return self._worker.committed

    def flush(self) -> None:
        """Wait until every step taken, and what load_state_dict was given, is committed."""
        self.write_staged()
        self._finish_steps()

    def _finish_steps(self) -> None:
        self._capture()
        self._worker.wait_committed(self.steps_done)

    # what people ask

    @property
    def params(self) -> Sequence[ParamSpec]:
        """What `read` can be asked for."""
        return self._table.params

    def grad_norm(self) -> float:
        """Of the last step's gradient: all parameters, before clipping, after loss scaling is
        undone. Waits until the servers have summed it."""
        if isinstance(self._norm, tuple):
            blocks, unscale = self._norm
            squares = sum(sum(self._worker.block_sums(b, sealed=True).values()) for b in blocks)
            self._norm = math.sqrt(squares) * unscale if math.isfinite(squares) else math.inf
        return self._norm

    def stages(self) -> dict[str, StageTotals]:
        return self._engine.stages.take()

    def memory(self) -> dict[str, int]:
        """Bytes: what roadtrain's buffers take now, and what plain training of this model needs."""
        plain = 0
        for chunk in self._table.chunks:
            n = sum(s.stop - s.start for s in chunk.spans)
            plain += chunk.weights_nbytes * (2 if chunk.trainable else 1)  # parameters, gradients
            if chunk.trainable:
                plain += (
                    n
                    * 4
                    * (
                        len(self._engine.store_plan.rules[chunk.group].arrays)
                        + (chunk.dtype != "fp32")
                    )
                )
        return {"resident": self._engine.nbytes(), "plain": plain}

    def read(self, name: str, what: str = "master") -> np.ndarray:
        """A parameter's fp32 master values or one of its state arrays, shaped like the
        parameter; or a state scalar."""
        self.flush()
        return self._engine.read(name, what)

    # states, as torch and frameworks save and load them

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def rules(self) -> Sequence[Any]:
        """Of each parameter group."""
        return self._engine.store_plan.rules[: len(self.param_groups)]

    @property
    def numbers(self) -> dict[int, int]:
        """Of each trainable parameter that has elements, its number in torch's form of a state."""
        flat = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        found = ((self._index[p], number) for number, p in enumerate(flat))
        specs = self._table.params
        return {
            index: number
            for index, number in found
            if specs[index].trainable and specs[index].numel
        }

    @property
    def reference(self) -> dict[str, Any]:
        """What a small state says: which step of which store it is of."""
        meta = self._engine.meta
        return {
            "step": self.steps_done,
            "job": meta.job,
            "history": self._history,
            "where": ", ".join(map(str, self._engine.store_plan.directories or meta.directories)),
        }

    def state_dict(self, gather: bool | None = None) -> dict[str, Any]:
        """Small (`gather` False; None unless `whole_states` is set and steps were taken): the step,
        the groups and a reference to the store, which is the checkpoint; with one worker the step
        is committed on return.
        `gather` True: torch's whole form; its tensors, fp32, lie in a scratch file (beside the
        store, else in the temporary directory) that is mapped into memory; with several workers
        all ask for it. Raises LoopError while updates run in backward."""
        if gather is None:  # accelerate asks before the first step, and loads what it was given
            gather = self.whole_states and self.steps_done != self._begun_at
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.write_staged()
        with self.reading() as pieces:
            if gather:
                self._finish_steps()
                where = self._states.where
                out = optimizer_states.gather(
                    self, pieces, lambda specs: Values(specs, ["fp32"] * len(specs), where)
                )
            else:
                groups = optimizer_states.groups_of(self.param_groups)
                out = {"state": {}, "param_groups": groups, optimizer_states.KEY: self.reference}
                self._say_ram()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, out)
            out = out if changed is None else changed
        return out

    def _say_ram(self) -> None:
        if (
            self.steps_done
            and self._engine.store_plan.directories == ()
            and self._engine.servers.local
        ):
            if self._said_ram:
                return
            self._said_ram = True
            self._report(
                "optimizer.state_dict() only refers to this process, whose state is in RAM: "
                "state_dict(gather=True) holds it"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the parameter groups. A small state must be of this store and of the step
        that it is at. A whole one is written to the store, which from then on is at the step of
        that state; on files it is committed on return. Raises LoopError, and then changes
        nothing: what the model's load_state_dict took just before is forgotten too."""
        try:
            self._load(state_dict)
        except BaseException:
            self._states.discard()
            raise
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, given: Mapping[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(given))
            given = given if changed is None else changed
        optimizer_states.check_groups(self, given)
        said, staged = given.get(optimizer_states.KEY), self._states.staged
        if not given["state"] and said is not None and "parameters" not in said:
            optimizer_states.check_reference(self, said)
            optimizer_states.take_groups(self, given)
            return
        if not given["state"] and (said is None or said["step"]):
            raise LoopError(
                "this state holds nothing of any parameter, and refers to no store",
                hint="state_dict() refers to the store, state_dict(gather=True) holds all",
            )
        optimizer_states.check_state(self, given)
        with self.reading() as pieces:
            if said is not None:
                optimizer_states.check_parameters(self, said, pieces, staged)
        before_it = optimizer_states.groups_of(self.param_groups)
        optimizer_states.take_groups(self, given)
        try:
            self._rewrite(given, self.steps_done if said is None else said["step"])
        except BaseException:
            optimizer_states.take_groups(self, {"param_groups": before_it})
            raise

    def write_staged(self) -> None:
        """What the model's load_state_dict put aside is written to the store, and committed
        there."""
        if self._states.staged and not self._writing:
            try:
                self._rewrite(None, self.steps_done)
            except BaseException:
                self._states.discard()  # it is said once; what the store holds goes on
                raise

    def _rewrite(self, given: Mapping[str, Any] | None, step: int) -> None:
        """`given`: a whole form of the optimizer's state. The store is at `step` afterwards."""
        self.check_rewrite()
        self._writing = True
        try:
            self._states.settle()
            self._finish_steps()
            before, self._history = self._history, uuid.uuid4().hex
            hyperparameters = [
                rule.hyper(group) for rule, group in zip(self.rules, self.param_groups)
            ]
            change = optimizer_states.writer(self, given, self._states.staged, hyperparameters)
            try:
                self._engine.rewrite(change, step, self.job_state())
            except BaseException:
                self._history = before
                raise
            self._states.discard()
            self.steps_done, self._norm = step, math.nan
            self._refresh_root()
        finally:
            self._writing = False

    def check_rewrite(self) -> None:
        """Raises LoopError where other values cannot be written to the store now."""
        if self._closed:
            raise LoopError(
                "the placed optimizer is closed: nothing can be loaded",
                hint="place the model again",
            )
        local = self._engine.servers.local
        if not local or self._engine.store_plan.staleness == 1:
            what = "with staleness 1" if local else "on servers"
            raise LoopError(
                f"other values cannot be loaded into state {what}",
                hint=(
                    "place(..., weights=DIRECTORY) on empty directories begins with the values"
                    " there"
                ),
            )
        if any(p.grad is not None for p in self._params):
            raise LoopError(
                "other values cannot be loaded while gradients wait for step()",
                hint="call step() or zero_grad() first",
            )
        self._check_not_updating()

    def _check_not_updating(self) -> None:
        step = self.steps_done + 1
        if any(state.updated for state in self._worker.blocks):
            raise LoopError(
                f"updates of step {step} have begun in backward: the parameters are of no step now",
                hint="call step() first",
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Pieces]:
        """What is inside can read values after the last step taken; of a closed optimizer, from
        its files."""
        if not self._closed:
            self._check_not_updating()
            # one of them may ask while the others wait for it: no commit comes then
            if self.group.workers > 1:
                self._capture()
            else:
                self._finish_steps()
            yield self._engine.pieces
        elif self._reopened is not None:
            yield self._reopened
        else:
            with self._reopen() as store:
                self._reopened = functools.partial(pieces_of, store)
                try:
                    yield self._reopened
                finally:
                    self._reopened = None

    @contextlib.contextmanager
    def _reopen(self) -> Iterator[OpenedStore]:
        store_plan = self._engine.store_plan
        if not store_plan.directories:
            local = self._engine.servers.local
            where = "in RAM, and are gone" if local else "on the servers"
            raise LoopError(
                f"the placed optimizer is closed: the parameters of this model rest {where}",
                hint="take state_dict() before close(), or place the model again",
            )
        with contextlib.closing(
            open_store(store_plan.directories, direct=store_plan.direct) or _nothing(store_plan)
        ) as store:
            if (store.meta.job, store.step) != (self._engine.meta.job, self.steps_done):
                raise LoopError(
                    f"the model's parameters were those of step {self.steps_done} when it was"
                    f" closed; the store in {store_plan.directories[0]} is at step"
                    f" {store.step} now",
                    hint="place the model again",
                )
            yield store

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LoopError(
            "a placed optimizer cannot be copied or pickled: its state is elsewhere",
            hint="state_dict() refers to it, state_dict(gather=True) holds it",
        )

    def abandon(self) -> None:
        """The last step is not to be committed, if that has not begun (it begins with the next
        forward): `close` commits those before it, and the next start takes it again. No step can
        follow."""
        self._abandoned = self._due is not None
        self._due = None

    def close(self) -> None:
        """Commit what was taken, end all threads, give the model its own forwards back. The
        model's block parameters refuse to be read: place it again, or export the store. Its
        state_dict() is read from the store's files, if there are."""
        if self._closed:
            return
        atexit.unregister(self._at_exit)
        try:
            if self._abandoned:
                self._worker.wait_committed(self.steps_done - 1)
            else:
                self.flush()
                self.grad_norm()
                self._states.settle()
                self._check_root()
                self._refresh_root()
        finally:
            self._closed = True
            for _, p in self._parts.root.params:
                if is_behind(p):
                    set_released(p)
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

    def attach(self, stream: BlockStream, activations: Activations) -> None:
        """Called once by place()."""
        self._stream = stream
        self._states.attach()
        self._hooks.append(self._model.register_forward_pre_hook(lambda *_: self._pass_begins()))
        for module in {
            m
            for m in self._model.modules()
            if any(p in self._index for p in m.parameters(recurse=False))
        }:
            if any(
                p is q for p in module.parameters(recurse=False) for _, q in self._parts.root.params
            ):
                self._hooks.append(
                    module.register_forward_pre_hook(lambda *_: self.forward_begins())
                )
        self._activations = activations


class _Elsewhere(defaultdict[Any, Any]):
    """`optimizer.state`: empty. torch.distributed.checkpoint.state_dict asks whether it is, and
    if so it makes one by a step with gradients of zero: that would be a step of the job."""

    def __bool__(self) -> bool:
        raise LoopError(
            "the state of a placed optimizer is in its store",
            hint="optimizer.state_dict() refers to it, state_dict(gather=True) holds it",
        )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict has, by their first names."""
    kept = {
        id(b)
        for m in model.modules()
        for n, b in m._buffers.items()
        if n not in m._non_persistent_buffers_set
    }
    return {name: b for name, b in model.named_buffers() if id(b) in kept}


def _nothing(store_plan: StorePlan) -> OpenedStore:
    raise GoneError(f"{store_plan.directories[0]}: holds no store any more")


def amp_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """(what gradients must be multiplied by, whether the step is skipped), as GradScaler.step
    left them there."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    unscale = 1.0 if scale is None else 1.0 / float(scale)
    return unscale, found is not None and bool(float(found))


def _close_quietly(placed: PlacedOptimizer | None) -> None:
    """At exit: commit what can be committed. What failed has been raised where it happened."""
    if placed is not None:
        with contextlib.suppress(Exception):
            placed.close()
