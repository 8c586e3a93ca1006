"""StoredOptimizer: a torch optimizer whose state is in the store, with the methods that commit,
save, load and read this state.

The subclass PlacedOptimizer (optimizer.py) takes the steps. optimizer_states.py and state_dicts.py
handle the state dicts of the optimizer and of the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from roadtrain.chunks import ParamSpec
from roadtrain.errors import GoneError, LoopError
from roadtrain.kernels.rule import Rule
from roadtrain.placement import optimizer_states
from roadtrain.placement.job_state import CommittedState
from roadtrain.placement.root_block import RootBlock
from roadtrain.placement.session_plan import SessionPlan
from roadtrain.placement.state_dicts import ModelStates, Pieces, Values
from roadtrain.retry import undone_on_error
from roadtrain.servers.local_servers import pieces_of
from roadtrain.servers.session import JobSession
from roadtrain.servers.trace import StageTotals
from roadtrain.storage.generation import OpenedStore, open_store
from roadtrain.streaming.grads import PlacedGrad
from roadtrain.streaming.split import Split


class StoredOptimizer(torch.optim.Optimizer):
    _states: ModelStates  # the model's state dicts; set by start()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Split,
        plan: SessionPlan,
        session: JobSession,
        extra: Mapping[str, Any],
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = _NoState(dict)
        self.model, self.table, self.session = model, plan.table, session
        self.request = plan.request
        self.group = session.group  # this worker's rank and the number of workers
        self.steps_done = session.step  # over all runs of the job
        self.whole_states = False  # see PlacedOptimizer
        self.root = RootBlock(parts.root, plan.table, session.worker)
        self._worker, self._report = session.worker, plan.request.report
        self.job_state = CommittedState(self, optimizer, model, session, extra, self._report)
        self._params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self._index = {p: i for i, p in enumerate(self._params)}
        # norm of the last step's gradient, or the pair (blocks, inverse loss scale) from which
        # grad_norm() computes the norm
        self._norm: float | tuple[list[int], float] = math.nan
        self._begun_at = session.step
        self.closed = False
        # whether load_state_dict ignores a reference to an earlier step of this store
        self.passes_over_earlier = False
        # whether a later place() in this process has taken over the store or the model
        self._placed_again = False
        self._writing = False  # whether loaded values are being written to the store
        # the function that reads the store after close(); set inside reading()
        self._reopened: Pieces | None = None
        self._warned_ram = False  # whether _say_ram has reported

    def check_usable(self) -> None:
        """Raise LoopError if no step can be taken: after `close`, and in a forked child."""
        self._worker.check_process()
        if self._placed_again:
            raise LoopError(
                "this optimizer is closed: its model or store was placed again in this process",
                hint="use the model and the optimizer of the later place() call",
            )
        if self.closed:
            raise LoopError("the placed optimizer is closed", hint="place the model again")

    def track(self, **things: Any) -> None:
        """Commit the state of these objects with each step, and restore their resumed state.

        Call this method after the objects are created and before the loop. If the optimizer has
        resumed a store, a scheduler continues its schedule, and a DataLoader continues with the
        next batch of its epoch. The state of a step includes changes that the loop makes before the
        next forward, for example by `scheduler.step()`. However, batches drawn after `step()`
        belong to the next step.

        Args:
            **things: Learning-rate schedulers, a DataLoader, a torch.Generator, a GradScaler, or
                other objects with `state_dict()` and `load_state_dict()`, under names of your
                choice.

        Raises:
            ConfigError: The state of an object cannot be committed or restored.
            LoopError: A step was already taken in this run, so the resumed state would be lost.
        """
        self.job_state.track(**things)

    @property
    def committed_step(self) -> int:
        """The last step that survives a crash."""
        return self._worker.committed

    def flush(self) -> None:
        """Wait until all steps that were taken and all states that were loaded are committed.

        Raises:
            LoopError: The optimizer is closed.
            StoreError: A commit failed.
            PeerError: A server failed or did not answer in time.
        """
        self.check_usable()
        self.write_staged()
        self._finish_steps()

    def _finish_steps(self) -> None:
        self.job_state.capture()
        self._worker.wait_committed(self.steps_done)

    # reading values and measurements

    @property
    def params(self) -> Sequence[ParamSpec]:
        """The specifications of all parameters. `read` returns the values of these parameters."""
        return self.table.params

    def read(self, name: str, what: str = "master") -> np.ndarray:
        """Wait for the commit of the last step, then read values of a parameter.

        Args:
            name: Name of the parameter in the model.
            what: "master" for the master values, or the name of a state array or state scalar of
                the parameter's update rule.

        Returns:
            An fp32 array in the shape of the parameter. For a state scalar, the shape is (1,).

        Raises:
            ConfigError: There is no such parameter or state.
        """
        self.flush()
        return self.session.read(name, what)

    def grad_norm(self) -> float:
        """Return the 2-norm of the last step's gradient over all parameters, before clipping and
        without loss scaling. Waits until the servers have summed the gradient.

        Returns:
            The norm: inf if the gradient contains an inf or nan; nan before the first step.
        """
        self._worker.check_process()
        if isinstance(self._norm, tuple):
            blocks, unscale = self._norm
            squares = sum(sum(self._worker.block_sums(b, last_step=True).values()) for b in blocks)
            self._norm = math.sqrt(squares) * unscale if math.isfinite(squares) else math.inf
        return self._norm

    def stages(self) -> dict[str, StageTotals]:
        """Return the seconds and bytes of each stage of a step (such as "Fetch", "Forward" or
        "Commit"), summed since the last call.

        Returns:
            A dict from the name of a stage to its totals.
        """
        self._worker.check_process()
        return self.session.stages.take()

    def memory(self) -> dict[str, int]:
        """Return how much memory is used, in bytes by kind.

        Returns:
            A dict with two keys. "resident" is the current size of roadtrain's buffers. "plain" is
            the size of the parameters, gradients and optimizer state that ordinary training of this
            model would hold.
        """
        plain = 0
        for chunk in self.table.chunks:
            plain += chunk.weights_nbytes
            if chunk.trainable:
                numel = sum(span.stop - span.start for span in chunk.spans)
                arrays = len(self.rules[chunk.group].arrays) + (chunk.dtype != "fp32")
                plain += chunk.weights_nbytes + 4 * numel * arrays
        return {"resident": self.session.nbytes(), "plain": plain}

    # state dicts, as torch and frameworks save and load them

    @property
    def rules(self) -> Sequence[Rule]:
        """The update rule of each parameter group."""
        return self.session.store_plan.rules[: len(self.param_groups)]

    def hyperparameters(self) -> dict[int, tuple[float, ...]]:
        """Return the current hyperparameters of each group's update rule."""
        pairs = zip(self.rules, self.param_groups)
        return {i: rule.hyper(group) for i, (rule, group) in enumerate(pairs)}

    @property
    def numbers(self) -> dict[int, int]:
        """Map the indices of parameters to their numbers in torch's state dict. Frozen and empty
        parameters are left out."""
        flat = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        found = ((self._index[p], number) for number, p in enumerate(flat))
        return {
            index: number
            for index, number in found
            if self.params[index].trainable and self.params[index].numel
        }

    @property
    def reference(self) -> dict[str, Any]:
        """The "roadtrain" entry of a state dict, which names the store and the store's current
        step."""
        meta = self.session.meta
        return {
            "step": self.steps_done,
            "job": meta.job,
            "history": self.job_state.history,
            "where": ", ".join(map(str, self.session.store_plan.directories or meta.directories)),
        }

    def state_dict(self, gather: bool | None = None) -> dict[str, Any]:
        """Return a state dict that only refers to the store, or one that contains all values.

        A reference has the step, the parameter groups and the name of the store; the store itself
        is the checkpoint. With one worker, the step is committed before the method returns.

        A state dict with all values resembles that of an ordinary torch optimizer. Its fp32 tensors
        are in a memory-mapped scratch file, beside the store or in the temporary directory. All
        workers must call the method together to get it.

        Args:
            gather: If True, return all values. If False, return a reference. If None, return all
                values if `whole_states` is set and a step was taken in this process, otherwise a
                reference.

        Returns:
            A dict with the keys "state", "param_groups" and "roadtrain".

        Raises:
            LoopError: Updates of an unfinished step have begun during backward.
        """
        # accelerate saves and loads a state before the first step, which should not gather values
        if gather is None:
            gather = self.whole_states and self.steps_done != self._begun_at
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.write_staged()
        with self.reading() as pieces:
            if gather:
                self._finish_steps()
                out = optimizer_states.gather(
                    self,
                    pieces,
                    lambda specs: Values(specs, ["fp32"] * len(specs), self._states.where),
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
        in_memory = self.session.servers.local and not self.session.store_plan.directories
        if self.steps_done and in_memory and not self._warned_ram:
            self._warned_ram = True
            self._report(
                "this optimizer.state_dict() only refers to the state in RAM, which is lost when"
                " this process ends: use state_dict(gather=True) to save the values"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that `state_dict` has returned, and adopt its parameter groups.

        A reference must name this store at its current step. If the state dict contains all values,
        these replace the values and the step of the store. If the store is on files, they are
        committed before the method returns.

        Args:
            state_dict: The result of `state_dict`, or the state dict of an ordinary torch
                optimizer.

        Raises:
            LoopError: The state dict does not fit this optimizer, the store or the store's step.
                The store was not changed. Values that the model's load_state_dict() has loaded, but
                that were not written yet, are discarded.
        """
        with undone_on_error(self._states.discard):
            self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, form: Mapping[str, Any]) -> None:
        self._worker.check_process()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(form))
            form = form if changed is None else changed
        optimizer_states.check_groups(self, form)
        ours, staged = form.get(optimizer_states.KEY), self._states.staged
        if self.passes_over_earlier and ours is not None and self._is_earlier(ours):
            self._states.discard()
            return
        if not form["state"] and ours is not None and "parameters" not in ours:
            optimizer_states.check_reference(self, ours)
            optimizer_states.take_groups(self, form)
            return
        if not form["state"] and (ours is None or ours["step"]):
            raise LoopError(
                "this state dict has neither values nor a reference to a store",
                hint="save a reference with state_dict(), or values with state_dict(gather=True)",
            )
        optimizer_states.check_state(self, form)
        with self.reading() as pieces:
            if ours is not None:
                optimizer_states.check_parameters(self, ours, pieces, staged)
        before_it = optimizer_states.groups_of(self.param_groups)
        optimizer_states.take_groups(self, form)
        with undone_on_error(
            lambda: optimizer_states.take_groups(self, {"param_groups": before_it})
        ):
            self._rewrite(form, self.steps_done if ours is None else ours["step"])

    def _is_earlier(self, found: Mapping[str, Any]) -> bool:
        """Whether the reference `found` names an earlier step of this store."""
        now = self.reference
        same = all(found.get(key) == now[key] for key in ("job", "history"))
        return same and found["step"] < now["step"]

    # the store between steps

    def write_staged(self) -> None:
        """Write the values staged by the model's load_state_dict to the store, and commit them."""
        if self._states.staged and not self._writing:
            # if writing fails, the error is raised once and the store's values remain in use
            with undone_on_error(self._states.discard):
                self._rewrite(None, self.steps_done)

    def _rewrite(
        self, form: Mapping[str, Any] | None, step: int, *, elsewhere: bool = False
    ) -> None:
        """Write staged values and the values of the state dict `form` to the store, and commit them
        at `step`. With `elsewhere`, the store is on remote servers, which are filled again."""
        if elsewhere:
            self._check_refill()
        else:
            self.check_rewrite()
        write = self.session.refill if elsewhere else self.session.rewrite
        self._writing = True
        try:
            self._states.settle()
            self._finish_steps()
            job = self.job_state
            before, job.history = job.history, uuid.uuid4().hex
            hyperparameters = [*self.hyperparameters().values()]
            change = optimizer_states.writer(self, form, self._states.staged, hyperparameters)
            with undone_on_error(lambda: setattr(job, "history", before)):
                write(change, step, job.encode())
            self._states.discard()
            self._arrive_at(step)
            self.root.refresh()
        finally:
            self._writing = False

    def _arrive_at(self, step: int) -> None:
        if step != self.steps_done:
            self.job_state.forget_resumed()
        self.steps_done, self._norm = step, math.nan

    def take_values(
        self, step: int, values: Mapping[int, torch.Tensor], state: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Write `values` and `state` to the store and commit them. The store is then at `step`.

        With servers, all workers must call this method, and the values of worker 0 are used.

        Args:
            step: The step that the values belong to.
            values: Values by parameter index, in fp32 for a trainable parameter, otherwise in the
                dtype of the parameter.
            state: Optimizer state by parameter index: the arrays and scalars of the update rule by
                name. Parameters that were never updated have no entry.

        Raises:
            LoopError: The values in the store cannot be replaced now.
        """
        numbers = self.numbers
        masters = {numbers[i]: value for i, value in values.items() if i in numbers}
        form = {
            "state": {numbers[i]: dict(entry) for i, entry in state.items()},
            optimizer_states.KEY: {"masters": masters},
        }
        self._states.staged.update({i: v for i, v in values.items() if i not in numbers})
        try:
            self._rewrite(form, step, elsewhere=not self.session.servers.local)
        finally:
            self._states.discard()

    @property
    def scratch(self) -> Path:
        """The directory for scratch files with values that are being saved or loaded."""
        return self._states.where

    def square_sums(self) -> dict[int, float]:
        """Return the sum of squares of the gradient of each parameter in this step. With several
        workers, the gradients of all workers are added first, and the elements of their sum are
        squared. Waits until all workers have pushed their gradients.

        Returns:
            A dict from parameter index to sum of squares, for parameters with a gradient.
        """
        workers, out = self.group.workers, dict[int, float]()
        if workers > 1:  # a block without a gradient here may have one on another worker
            for block in range(len(self.table.blocks)):
                out |= self._worker.block_sums(block)
        else:
            for index, p in enumerate(self._params):
                if isinstance(p.grad, PlacedGrad):
                    out[index] = self._worker.sum_squares(index)
        return {index: value * workers**2 for index, value in out.items()}

    def check_rewrite(self) -> None:
        """Raise LoopError if the values in the store cannot be replaced by new values now."""
        self._worker.check_process()
        if self.closed:
            raise LoopError(
                "the placed optimizer is closed: nothing can be loaded",
                hint="place the model again",
            )
        local = self.session.servers.local
        if not local or self.session.store_plan.staleness == 1:
            what = "with staleness 1" if local else "on servers"
            raise LoopError(
                f"new values cannot be loaded into a store {what}",
                hint="to begin with new values, place the model on an empty store with place(...,"
                " weights=DIRECTORY)",
            )
        self._check_replaceable()

    def _check_refill(self) -> None:
        """Raise LoopError if remote servers cannot be filled with new values now."""
        self._check_replaceable()
        if self.session.store_plan.staleness or self._worker.residual_block:
            raise LoopError(
                "new values cannot be loaded into servers if the job has a delay or error feedback",
                hint="leave out delay and error feedback, or keep the state in files of this host",
            )

    def _check_replaceable(self) -> None:
        """Raise LoopError if a step is in progress."""
        if any(p.grad is not None for p in self._params):
            raise LoopError(
                "new values cannot be loaded while there are gradients for the next step()",
                hint="call step() or zero_grad() first",
            )
        self._check_not_updating()

    def _check_not_updating(self) -> None:
        step = self.steps_done + 1
        if any(state.updated for state in self._worker.blocks):
            raise LoopError(
                f"updates of step {step} have begun during backward, but the step has not ended",
                hint="call step() first",
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Pieces]:
        """Context manager whose target is a function that reads values from the store. The values
        include the update of the last step(). After `close`, the function reads the store's files.
        """
        if not self.closed or self._placed_again:
            self.check_usable()
            self._check_not_updating()
            # Perhaps not all workers call this method, so waiting for the commit might never end.
            if self.group.workers > 1:
                self.job_state.capture()
            else:
                self._finish_steps()
            yield self.session.pieces
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
        store_plan = self.session.store_plan
        if not store_plan.directories:
            where = "in RAM and are lost" if self.session.servers.local else "on the servers"
            raise LoopError(
                f"the model's parameters cannot be read after close(), because they were {where}",
                hint="call state_dict() before close(), or place the model again",
            )
        store = open_store(store_plan.directories, direct=store_plan.direct)
        if store is None:
            raise GoneError(f"{store_plan.directories[0]}: the store no longer exists")
        with contextlib.closing(store):
            if (store.meta.job, store.step) != (self.session.meta.job, self.steps_done):
                raise LoopError(
                    f"the optimizer was closed at step {self.steps_done}, but the store in"
                    f" {store_plan.directories[0]} is now at step {store.step}, so the model's"
                    " parameters cannot be read",
                    hint="place the model again",
                )
            yield store

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LoopError(
            "a placed optimizer cannot be copied or pickled: its state is in the store",
            hint="use state_dict(), or state_dict(gather=True) for a copy of the values",
        )


class _NoState(defaultdict[Any, Any]):
    """`optimizer.state` of a placed optimizer: an empty dict that raises an error as a boolean.

    Code in torch.distributed.checkpoint tests the dict. If it were false, torch would take a step
    with zero gradients to create the state.
    """

    def __bool__(self) -> bool:
        raise LoopError(
            "optimizer.state is empty, because the state of a placed optimizer is in its store",
            hint="use optimizer.state_dict(), or state_dict(gather=True) for the values",
        )
