"""PlacedOptimizer: a torch optimizer whose state is in the store instead of in `optimizer.state`.

Backward pushes the gradient of each block, and step() starts the updates. A factor from clipping or
loss scaling is passed to the updates. The step is committed while the next step computes. The
servers run the update rules.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import itertools
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from roadtrain.errors import LoopError
from roadtrain.placement import interrupts
from roadtrain.placement.session_plan import Request, SessionPlan
from roadtrain.placement.state_dicts import ModelStates
from roadtrain.placement.stored_optimizer import StoredOptimizer
from roadtrain.servers.session import JobSession
from roadtrain.servers.trace import as_words, flat_numbers
from roadtrain.servers.worker import Gradient
from roadtrain.streaming.block_stream import BlockStream
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.leaves import check_device
from roadtrain.streaming.released import forbid_in_child, is_called_by_dynamo, settle
from roadtrain.streaming.split import Split

_live: weakref.WeakSet[PlacedOptimizer] = weakref.WeakSet()  # optimizers that are not closed yet
# optimizers that were dropped without close() and are being closed in the background
_closing: set[PlacedOptimizer] = set()


class PlacedOptimizer(StoredOptimizer):
    """The optimizer that `place` returns. As a context manager, it calls close() at the end of the
    `with` statement.

    Args:
        model: The placed model.
        optimizer: The optimizer that was passed to place(). Both optimizers share its parameter
            groups.
        parts: The model's modules and parameters by block.
        plan: The tables and budgets of the session, and the options of place().
        session: The open session with the servers.
        extra: Objects to track, by name.

    Attributes:
        steps_done: The number of steps taken so far, in all runs of the job.
        committed_step: The last step that survives a crash.
        whole_states: Whether `state_dict()` without arguments gathers all values, once a step was
            taken in this process. Initially False.
    """

    # tells GradScaler that step() itself handles the scale and skips a step with inf or nan
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Split,
        plan: SessionPlan,
        session: JobSession,
        extra: Mapping[str, Any],
    ) -> None:
        super().__init__(model, optimizer, parts, plan, session, extra)
        # Schedulers that were made before place() refer to the user's optimizer.
        self._user_optimizer: Any = optimizer
        # This object is the BlockSource of BlockStream, which calls these methods.
        self.release = self._worker.release
        self.lay_out = self._worker.lay_out
        self.sum_squares = self._worker.sum_squares
        self._of_block = [
            [p for _, p in part.params if p.requires_grad] for part in (parts.root, *parts.blocks)
        ]
        self._promise = plan.request.backwards_per_step
        self._passes = 0  # number of backward passes of this step that have ended
        # If True, the end of a pass does not push the root's gradients; the caller pushes them with
        # root.pass_ended().
        self.root_waits = False
        # hyperparameters of the updates that this step's backward has started; None if backward has
        # started no updates
        self._begun_with: dict[int, tuple[float, ...]] | None = None
        self._stream: BlockStream | None = None
        self._hooks: list[Any] = []
        self._compiles_blocks = plan.request.compile
        # Whether torch.compile runs the model. It guards the classes of the root's parameters, so
        # these classes must not change.
        self._compiled = False
        self._abandoned = False
        me = weakref.ref(self)
        self._at_exit = lambda: _close_quietly(me())
        atexit.register(self._at_exit)
        interrupts.begin()
        _live.add(self)
        self._made = id(self)

    def start(self, parts: Split, plan: SessionPlan) -> None:
        """Commit a new store as step 0 or resume an old store, and install hooks in the model.
        Called once, after a new store has its initial values."""
        session, directories = self.session, self.session.store_plan.directories
        scratch = directories[0] if directories else None
        budgets = plan.budgets.worker
        stream = BlockStream(
            parts,
            plan.table,
            self,
            plan.device,
            self.pass_ended,
            activation_bytes=budgets.activation_bytes,
            device_bytes=budgets.device.activation_bytes if budgets.device else 0,
            scratch_dir=scratch,
        )
        for buffer in self.model.buffers():
            settle(buffer, buffer.detach().to(plan.device))
        session.start(self.job_state.encode())
        stream.attach(session.worker.root_tensor, compile=self._compiles_blocks)
        self._stream, self.root.layout = stream, stream.root
        self._states = ModelStates(
            self.model, self._params, plan.table.params, self, scratch, self._report
        )
        self._watch_forwards(parts)
        if not session.new and session.blob:
            self.job_state.resume(session.blob)
        self.root.refresh()

    def _watch_forwards(self, parts: Split) -> None:
        self._hooks.append(self.model.register_forward_pre_hook(lambda *_: self._pass_begins()))
        of_root = {p for _, p in self.root.params}
        blocks = {part.module for part in parts.blocks}
        self._compiled = _compiles(self.model, blocks)
        if any(_compiles(module, blocks) for module in self.model.modules()):
            self._say_compiled()
        # A block's hook covers its modules: compiled code of the block would contain their hooks.
        inside = {module for block in blocks for module in block.modules()} - blocks
        for name, module in self.model.named_modules():
            own = module.parameters(recurse=module in blocks)
            if module not in inside and not of_root.isdisjoint(own):
                begins = partial(self._root_module_begins, name)
                self._hooks.append(module.register_forward_pre_hook(begins))

    def _say_compiled(self) -> None:
        if not self._compiles_blocks:
            self._report(
                "torch.compile compiles only the root block of this model: to compile the other"
                " blocks, call place() with compile=True"
            )

    @torch.compiler.disable
    def _root_module_begins(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.forward_begins()
        check_device(args, self.job_state.device, f"{type(module).__name__} {name!r}")

    # called by BlockStream

    def fetch(self, block: int) -> tuple[torch.Tensor, int]:
        self.check_usable()
        self.write_staged()
        return self._worker.fetch(block)

    def push(self, block: int, buffer: Gradient, present: Sequence[int]) -> None:
        state = self._worker.blocks[block]
        fresh = all(p.grad is None for p in self._of_block[block])
        if not fresh and not state.held and not state.updated:
            raise LoopError(
                f"block '{self.table.blocks[block].name}' got a gradient, but its gradient of the"
                " last step was not cleared",
                hint="call optimizer.zero_grad() once per step",
            )
        if not fresh and self._worker.residual_block:
            raise LoopError(
                "error feedback allows one backward pass per step, but this is the second pass",
                hint="run one backward pass before each step(), or set error_feedback=False",
            )
        assert self._stream is not None
        if self._passes + 1 != self._promise or self._stream.pending(block):
            self._worker.push_block(block, buffer, present, fresh=fresh)
            return
        if self._begun_with is None:
            self._states.settle()
            self._begun_with = self.hyperparameters()
        self._worker.push_block(
            block,
            buffer,
            present,
            fresh=fresh,
            step=self.steps_done + 1,
            hyperparameters=self._begun_with,
        )

    def pass_ended(self) -> None:
        self._passes += 1
        if self._worker.workers > 1 and not self.root_waits:
            self.root.pass_ended()

    def memory(self) -> dict[str, int]:
        """Return how much memory is used, in bytes by kind.

        Returns:
            A dict with the keys "resident" and "plain" as in `StoredOptimizer.memory`, and
            "activations": the peak size of the activations that were kept on the host.
        """
        assert self._stream is not None
        return super().memory() | {"activations": self._stream.activations.peak_bytes}

    def metrics(self, flat: bool = False) -> dict[str, Any]:
        """Return measurements of the last step, in the words of a line of metrics.jsonl.

        Call this method once per step, after `step()`. It waits until the servers have summed the
        gradient, unless updates are delayed.

        Args:
            flat: Return only numbers, under names such as "stages/Fetch/seconds", as trackers want
                them.

        Returns:
            A dict with "step"; "committed", the last step that survives a crash; "grad_norm", None
            if it is not finite or updates are delayed; "stages", the seconds and bytes of each
            stage since the last call; "memory", the bytes in use and the budget, or None, of
            "host", "process", "device" (on an accelerator) and "disk" (with a store on files); and
            "lossy", the options that make training lossy or late, if there are any.
        """
        assert self._stream is not None
        stages = as_words(self.stages())
        norm = math.nan if self.request.delay else self.grad_norm()
        line = {
            "step": self.steps_done,
            "committed": self.committed_step,
            "grad_norm": norm if math.isfinite(norm) else None,
            "stages": stages,
            "memory": self.session.usage(self._stream.activations.peak_bytes),
        }
        lossy = self.request.lossy
        line |= {"lossy": lossy} if lossy else {}
        return flat_numbers(line) if flat else line

    # torch.optim.Optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients that step() has not used yet.

        Args:
            set_to_none: Ignored; gradients are always set to None.
        """
        self.root.handles.clear()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add a parameter group, because the groups are fixed when place() is called.

        Args:
            param_group: A torch parameter group.

        Raises:
            LoopError: Always.
        """
        if hasattr(self, "session"):
            raise LoopError(
                "groups cannot be added to a placed optimizer", hint="add groups before place()"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the updates of this step, and end the step.

        The updates run while the next forward computes. With GradScaler, a step with inf or nan is
        skipped: `steps_done` is increased, but parameters and optimizer state do not change.

        Args:
            closure: A function that computes the loss and its gradients, as for any torch
                optimizer.

        Returns:
            The result of `closure`, or None without a closure.

        Raises:
            LoopError: Gradients of blocks were set by hand. Or `backwards_per_step` was passed to
                place(), but after backward the gradients were scaled or a hyperparameter was
                changed.
        """
        loss = None
        if closure is not None:
            self.job_state.check_lightning(
                *getattr(closure, "args", ())
            )  # the arguments of Lightning's closure include its module
            with torch.enable_grad():
                loss = closure()
        self.check_usable()
        self.write_staged()
        if self._begun_with is None:
            self._states.settle()
        self._check_gradients()
        self.job_state.capture()
        unscale, skip = amp_of(self)
        hyperparameters = self.hyperparameters()
        self._check_promise(hyperparameters, unscale, skip)
        self.root.push_gradients()
        blocks = self._update_blocks(hyperparameters, unscale, skip)
        self._worker.end_step(self.steps_done + 1)
        self.steps_done += 1
        self._norm = blocks, abs(unscale)
        self.job_state.step_ended(self.steps_done)
        self._begun_with, self._passes = None, 0
        self._user_optimizer._opt_called = True
        self.root.handles.clear()  # model.zero_grad() does not clear them
        if self._worker.root_is_old and not self._compiled:
            self.root.refresh_when_read()
        return loss

    def _update_blocks(
        self, hyperparameters: Mapping[int, tuple[float, ...]], unscale: float, skip: bool
    ) -> list[int]:
        """Start the updates that backward has not started. Returns the blocks that may have a
        gradient."""
        several = self._worker.workers > 1
        states = self._worker.blocks[: len(self.table.blocks)]
        blocks = [b for b, s in enumerate(states) if s.held or s.updated or several]
        for block in blocks:
            if states[block].updated:
                continue
            if skip and not several:
                self._worker.forget(block)
            else:
                self._worker.apply_update(
                    block,
                    self.steps_done + 1,
                    hyperparameters,
                    lambda i: None if skip else self._scale(i, unscale),
                )
        return blocks

    def _scale(self, param: int, unscale: float) -> float | None:
        p = self._params[param]
        grad = self.root.handles.get(p) if p.grad is None else p.grad
        if grad is None:
            return None
        return (grad.scale if isinstance(grad, PlacedGrad) else 1.0) * unscale

    def _check_gradients(self) -> None:
        for p in itertools.chain.from_iterable(self._of_block[1:]):
            if p.grad is not None and not isinstance(p.grad, PlacedGrad):
                raise LoopError(
                    f"the gradient of {self.params[self._index[p]].name!r} was set by hand, but"
                    " such gradients of blocks do not reach the servers",
                    hint="compute the gradients of blocks with backward()",
                )

    def _check_promise(
        self, hyperparameters: Mapping[int, tuple[float, ...]], unscale: float, skip: bool
    ) -> None:
        if self._begun_with is None:
            return
        scaled = any(isinstance(p.grad, PlacedGrad) and p.grad.scale != 1.0 for p in self._params)
        if skip or unscale != 1.0 or scaled or hyperparameters != self._begun_with:
            raise LoopError(
                "with backwards_per_step the updates began during backward, but afterwards the"
                " gradients were scaled or a hyperparameter such as lr was changed",
                hint="call place() without backwards_per_step, so that updates begin at step()",
            )

    # a forward pass

    @torch.compiler.disable
    def _pass_begins(self) -> None:
        if not self._compiled and is_called_by_dynamo():
            self._compiled = True
            self._say_compiled()
        self.root.check_unchanged()
        if torch.is_grad_enabled():
            self._check_no_strangers()
            self.job_state.check_tracked()
        self.forward_begins()

    def _check_no_strangers(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad and p not in self._index:
                raise LoopError(
                    f"parameter {name!r} was added after place(), so it would not be trained",
                    hint="add adapters and resize embeddings before place(), or place it again",
                )

    def forward_begins(self) -> None:
        """Capture the last step's job state and refresh the root block before a module computes."""
        self.check_usable()
        self.write_staged()
        if torch.is_grad_enabled():
            self.job_state.capture(at_forward=True)
            self.root.pass_begins()
        self.root.refresh()

    # closing

    def abandon(self) -> None:
        """Give up the last step if its commit has not begun; the next run of the job repeats it.
        This process cannot take further steps."""
        self._abandoned = self.job_state.due is not None
        self.job_state.due = None

    def close(self) -> None:
        """Commit all steps, end all threads and restore the model's own forward methods.

        The model's block parameters can no longer be read: place the model again, or export the
        store. If the store is on files, state_dict() still works and reads the files.

        Raises:
            StoreError: The last steps could not be committed.
            PeerError: A server failed or did not answer in time.
        """
        if self.closed:
            return
        self._worker.check_process()
        try:
            if self._abandoned:
                self._worker.wait_committed(self.steps_done - 1)
            else:
                self.flush()
                self.grad_norm()
                self._states.settle()
                self.root.check_unchanged()
                self.root.refresh()
        finally:
            self.end()

    def end(self) -> None:
        """Close without committing further steps."""
        atexit.unregister(self._at_exit)
        _live.discard(self)
        if not _live:
            interrupts.end()
        self.closed = True
        self.zero_grad()  # gradients that no step will use
        self.root.close()
        for hook in self._hooks:
            hook.remove()
        if self._stream is not None:
            self._stream.detach()
        self.session.close()

    def __del__(self) -> None:
        """Close an optimizer that was dropped without close(), as when a notebook cell is rerun."""
        # Lightning's optimizer is an instance of a subclass and has a copy of our attributes.
        if getattr(self, "_made", 0) != id(self) or self.closed:
            return
        if os.getpid() != self._worker.maker:
            return
        # The garbage collector runs in any thread at any moment. The current thread may hold a lock
        # that close() or Thread.start() needs, so call neither in this thread.
        _closing.add(self)
        closes = threading.Thread(target=_close_and_say, args=(self,), daemon=False)
        _thread.start_new_thread(closes.start, ())

    def __enter__(self) -> PlacedOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close_after(kind)

    def _close_after(self, kind: type[BaseException] | None) -> None:
        """Close the optimizer after the loop. `kind`: the type of the error that ended the loop.

        If the loop has failed and a scheduler is tracked, the last step is abandoned: the error may
        have prevented scheduler.step().
        """
        if kind is not None and self.job_state.has_schedule:
            self.abandon()
        if self.closed or not interrupts.ended_by(kind):
            self.close()
            return
        self._worker.deadline_s = min(self._worker.deadline_s, interrupts.DEADLINE_S)
        with interrupts.second_ends_at_once():
            _close_and_say(self)
        if self.group.rank == 0:
            where = "RAM, and is lost" if self.request.in_memory else self.reference["where"]
            self._report(
                f"roadtrain: interrupted; step {self.committed_step} is committed in {where};"
                f" {interrupts.command()}"
            )


def amp_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return the factor that undoes GradScaler's loss scaling, and whether to skip the step because
    of inf or nan."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    unscale = 1.0 if scale is None else 1.0 / float(scale)
    return unscale, found is not None and bool(float(found))


def close_earlier(request: Request, model: nn.Module, *, all_of_model: bool) -> None:
    """Close earlier sessions of this process that conflict with `request`, and commit their steps.

    Two sessions conflict if they use the same directory, or the same server with the same rank. If
    `all_of_model` is set, every session of `model` conflicts.

    Raises:
        LoopError: The state of `model` is in RAM and would be lost.
    """
    while any(placed._worker.maker == os.getpid() for placed in list(_closing)):
        time.sleep(0.01)  # ends, because each close() has a deadline
    for placed in list(_live):
        if placed.model is model and placed.request.in_memory and not request.in_memory:
            raise LoopError(
                f"the model is already placed, at step {placed.steps_done}, with its state only in"
                " RAM: placing the model again would lose the state",
                hint=(
                    "continue with the optimizer that place() returned; or save the state_dict() of"
                    " this optimizer and of the model, then call close() on the optimizer"
                ),
            )
        if placed._worker.maker != os.getpid():
            continue
        if (all_of_model and placed.model is model) or placed.request.held & request.held:
            _close_and_say(placed)
            placed._placed_again = True
            request.report("placed again in this process: the earlier session was closed")


def _close_and_say(placed: PlacedOptimizer) -> None:
    """Close `placed`, and report an error if its last step could not be committed."""
    try:
        placed.close()
    except Exception as error:
        if placed.steps_done > placed.committed_step:
            placed.request.report(f"step {placed.steps_done} could not be committed: {error}")
    finally:
        _closing.discard(placed)


def _release_in_child() -> None:
    """Forbid reading root parameters in a forked child, which does not share their memory."""
    for placed in list(_live):
        forbid_in_child(placed.root.params, placed._worker.maker)


os.register_at_fork(after_in_child=_release_in_child)


def _compiles(module: nn.Module, blocks: set[nn.Module]) -> bool:
    """Return whether `module` runs under torch.compile and calls a module in `blocks`."""
    inner = module._orig_mod if isinstance(module, OptimizedModule) else module
    compiled = inner is not module or module._compiled_call_impl is not None
    return compiled and not blocks.isdisjoint(inner.modules())


def _close_quietly(placed: PlacedOptimizer | None) -> None:
    if placed is not None:
        with contextlib.suppress(Exception):
            placed._close_after(
                interrupts.Terminated if interrupts.terminated else getattr(sys, "last_type", None)
            )
