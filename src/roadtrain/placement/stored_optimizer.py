"""StoredOptimizer: a torch optimizer whose state rests with servers; how it is committed, saved,
loaded and read.

A state dict refers to the store or is gathered from it (optimizer_states.py). Loaded values are
written to the store at once. The model's own state dicts (state_dicts.py) read and write the store
through this object as well.

Assumes: the subclass PlacedOptimizer (optimizer.py) takes the steps. Does NOT move bytes;
servers/worker.py does.
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
    _states: ModelStates  # the model's own state dicts, from start() on

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
        self.state = _Elsewhere(dict)
        self.model, self.table, self.session = model, plan.table, session
        self.request = plan.request
        self.group = session.group  # which of the workers this is
        self.steps_done = session.step  # over all runs of the job
        # what state_dict() gives where `gather` is not said, once a step was taken here
        self.whole_states = False
        self.root = RootBlock(parts.root, plan.table, session.worker)
        self._worker, self._report = session.worker, plan.request.report
        self.job_state = CommittedState(self, optimizer, model, session, extra, self._report)
        self._params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self._index = {p: i for i, p in enumerate(self._params)}
        # the norm of the last step's gradient or, until asked for: (blocks, loss scaling undone)
        self._norm: float | tuple[list[int], float] = math.nan
        self._begun_at = session.step
        self._closed = False
        # whether load_state_dict passes over a state of an earlier step of this store
        self.passes_over_earlier = False
        self._placed_again = False  # another session of this process holds the store, or the model
        self._writing = False  # what was loaded is on its way to the store
        self._reopened: Pieces | None = None  # of a closed store, while it is read
        self._said_ram = False  # that a small state refers to what ends with this process

    def check_usable(self) -> None:
        """Raise LoopError where no step can be taken: after `close`, and in a forked child."""
        self._worker.check_process()
        if self._placed_again:
            raise LoopError(
                "this optimizer is closed: its model or its store was placed again in this process",
                hint="use the model and the optimizer of the later place()",
            )
        if self._closed:
            raise LoopError("the placed optimizer is closed", hint="place the model again")

    def track(self, **things: Any) -> None:
        """Commit the state of these objects with each step, and restore that of a resumed step.

        Call it after the objects are made and before the loop. On a resumed optimizer the objects
        get the state of the resumed step: a scheduler goes on in its schedule, a DataLoader with
        the next batch of its epoch. A step's state holds what the loop does until the next
        forward, such as `scheduler.step()`; batches are counted as of `step()`.

        Args:
            things: By a name of your choice: learning-rate schedulers, a DataLoader, a
                torch.Generator, a GradScaler, or any object with `state_dict()` and
                `load_state_dict()`.

        Raises:
            ConfigError: The state of an object cannot be committed or restored.
            LoopError: A step was taken after the resumed one, whose state would be lost.
        """
        self.job_state.track(**things)

    @property
    def committed_step(self) -> int:
        """The last step that no crash can lose any more."""
        return self._worker.committed

    def flush(self) -> None:
        """Wait until every step taken, and what load_state_dict was given, is committed."""
        self.check_usable()
        self.write_staged()
        self._finish_steps()

    def _finish_steps(self) -> None:
        self.job_state.capture()
        self._worker.wait_committed(self.steps_done)

    # what people ask

    @property
    def params(self) -> Sequence[ParamSpec]:
        """What `read` can be asked for."""
        return self.table.params

    def read(self, name: str, what: str = "master") -> np.ndarray:
        """A parameter's fp32 master values or one of its state arrays, shaped like the parameter;
        or one of its state scalars, as an array of one. Waits for the commit of the last step.
        Raises ConfigError for what is not there."""
        self.flush()
        return self.session.read(name, what)

    def grad_norm(self) -> float:
        """The 2-norm of the last step's gradient over all parameters, before clipping and after
        loss scaling is undone. Waits until the servers have summed it."""
        self._worker.check_process()
        if isinstance(self._norm, tuple):
            blocks, unscale = self._norm
            squares = sum(sum(self._worker.block_sums(b, last_step=True).values()) for b in blocks)
            self._norm = math.sqrt(squares) * unscale if math.isfinite(squares) else math.inf
        return self._norm

    def stages(self) -> dict[str, StageTotals]:
        """Seconds and bytes of each stage of a step, since the last call."""
        self._worker.check_process()
        return self.session.stages.take()

    def memory(self) -> dict[str, int]:
        """Bytes. "resident": of roadtrain's buffers now; "plain": of the parameters, gradients and
        state that plain training of this model would hold."""
        plain = 0
        for chunk in self.table.chunks:
            plain += chunk.weights_nbytes
            if chunk.trainable:
                numel = sum(span.stop - span.start for span in chunk.spans)
                arrays = len(self.rules[chunk.group].arrays) + (chunk.dtype != "fp32")
                plain += chunk.weights_nbytes + 4 * numel * arrays
        return {"resident": self.session.nbytes(), "plain": plain}

    # states, as torch and frameworks save and load them

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def rules(self) -> Sequence[Rule]:
        """The update rule of each parameter group."""
        return self.session.store_plan.rules[: len(self.param_groups)]

    def hyperparameters(self) -> dict[int, tuple[float, ...]]:
        """What each group's rule takes now."""
        pairs = zip(self.rules, self.param_groups)
        return {i: rule.hyper(group) for i, (rule, group) in enumerate(pairs)}

    @property
    def numbers(self) -> dict[int, int]:
        """For each trainable parameter that has elements: its number in torch's form of a state."""
        flat = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        found = ((self._index[p], number) for number, p in enumerate(flat))
        return {
            index: number
            for index, number in found
            if self.params[index].trainable and self.params[index].numel
        }

    @property
    def reference(self) -> dict[str, Any]:
        """What a small state says: the step and the store that it is of."""
        meta = self.session.meta
        return {
            "step": self.steps_done,
            "job": meta.job,
            "history": self.job_state.history,
            "where": ", ".join(map(str, self.session.store_plan.directories or meta.directories)),
        }

    def state_dict(self, gather: bool | None = None) -> dict[str, Any]:
        """The state, small or whole.

        `gather` False (also None, unless `whole_states` is set and a step was taken): the step, the
        groups and a reference to the store, which is the checkpoint. With one worker the step is
        committed on return.
        `gather` True: torch's whole form. Its fp32 tensors lie in a scratch file that is mapped
        into memory: beside the store, or in the temporary directory. With several workers, all must
        ask for it. Raises LoopError while updates run in backward."""
        if gather is None:  # accelerate asks before the first step, and loads what it was given
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
        if self.steps_done and in_memory and not self._said_ram:
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
        with undone_on_error(self._states.discard):
            self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, given: Mapping[str, Any]) -> None:
        self._worker.check_process()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(given))
            given = given if changed is None else changed
        optimizer_states.check_groups(self, given)
        said, staged = given.get(optimizer_states.KEY), self._states.staged
        if self.passes_over_earlier and said is not None and self._is_earlier(said):
            self._states.discard()
            return
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
        with undone_on_error(
            lambda: optimizer_states.take_groups(self, {"param_groups": before_it})
        ):
            self._rewrite(given, self.steps_done if said is None else said["step"])

    def _is_earlier(self, said: Mapping[str, Any]) -> bool:
        """Whether a state speaks of an earlier step of this very store."""
        now = self.reference
        same = all(said.get(key) == now[key] for key in ("job", "history"))
        return same and said["step"] < now["step"]

    # the store between steps

    def write_staged(self) -> None:
        """Writes to the store what the model's load_state_dict put aside, and commits it there."""
        if self._states.staged and not self._writing:
            with undone_on_error(
                self._states.discard
            ):  # it is said once; what the store holds goes on
                self._rewrite(None, self.steps_done)

    def _rewrite(
        self, given: Mapping[str, Any] | None, step: int, *, elsewhere: bool = False
    ) -> None:
        """`given`: a whole form of the optimizer's state. The store is at `step` afterwards.
        `elsewhere`: it is the store of servers elsewhere, which are filled anew."""
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
            change = optimizer_states.writer(self, given, self._states.staged, hyperparameters)
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
        """The store is at `step` afterwards, with these. By index of a parameter: `values`, fp32
        where it is trained, else in its own dtype; `state`, by the names of its rule's arrays and
        scalars, for one that was updated before. Committed on return. With servers all workers call
        it, and the first one's values count. Raises LoopError where the store cannot take them."""
        numbers = self.numbers
        masters = {numbers[i]: value for i, value in values.items() if i in numbers}
        given = {
            "state": {numbers[i]: dict(entry) for i, entry in state.items()},
            optimizer_states.KEY: {"masters": masters},
        }
        self._states.staged.update({i: v for i, v in values.items() if i not in numbers})
        try:
            self._rewrite(given, step, elsewhere=not self.session.servers.local)
        finally:
            self._states.discard()

    @property
    def scratch(self) -> Path:
        """Where values that are handed out or taken may lie."""
        return self._states.where

    def square_sums(self) -> dict[int, float]:
        """By index of each parameter with a gradient: the sum of squares of what all workers have
        pushed in this step, added up. Waits for it."""
        workers, out = self.group.workers, dict[int, float]()
        if workers > 1:  # all ask for all: another one may have a gradient where this one has none
            for block in range(len(self.table.blocks)):
                out |= self._worker.block_sums(block)
        else:
            for index, p in enumerate(self._params):
                if isinstance(p.grad, PlacedGrad):
                    out[index] = self._worker.sum_squares(index)
        return {index: value * workers**2 for index, value in out.items()}

    def check_rewrite(self) -> None:
        """Raises LoopError where other values cannot be written to the store now."""
        self._worker.check_process()
        if self._closed:
            raise LoopError(
                "the placed optimizer is closed: nothing can be loaded",
                hint="place the model again",
            )
        local = self.session.servers.local
        if not local or self.session.store_plan.staleness == 1:
            what = "with staleness 1" if local else "on servers"
            raise LoopError(
                f"other values cannot be loaded into state {what}",
                hint=(
                    "place(..., weights=DIRECTORY) on empty directories begins with the values"
                    " there"
                ),
            )
        self._check_replaceable()

    def _check_refill(self) -> None:
        """Raises LoopError where servers elsewhere cannot be filled with other values now."""
        self._check_replaceable()
        if self.session.store_plan.staleness or self._worker.residual_block:
            raise LoopError(
                "other values cannot be loaded into servers with a delay or error feedback",
                hint="leave them out, or place this stage on files of its host",
            )

    def _check_replaceable(self) -> None:
        """Raises LoopError where a step is under way."""
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
        """The body can read values as of the last step taken; those of a closed optimizer come
        from its files."""
        if not self._closed or self._placed_again:
            self.check_usable()
            self._check_not_updating()
            # one of them may ask while the others wait for it: no commit comes then
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
            where = "in RAM, and are gone" if self.session.servers.local else "on the servers"
            raise LoopError(
                f"the placed optimizer is closed: the parameters of this model rest {where}",
                hint="take state_dict() before close(), or place the model again",
            )
        store = open_store(store_plan.directories, direct=store_plan.direct)
        if store is None:
            raise GoneError(f"{store_plan.directories[0]}: holds no store any more")
        with contextlib.closing(store):
            if (store.meta.job, store.step) != (self.session.meta.job, self.steps_done):
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


class _Elsewhere(defaultdict[Any, Any]):
    """`optimizer.state`: empty. torch.distributed.checkpoint.state_dict asks whether it is, and
    if so it makes one by a step with gradients of zero: that would be a step of the job."""

    def __bool__(self) -> bool:
        raise LoopError(
            "the state of a placed optimizer is in its store",
            hint="optimizer.state_dict() refers to it, state_dict(gather=True) holds it",
        )
