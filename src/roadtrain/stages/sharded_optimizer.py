"""ShardedOptimizer: a stage's optimizer, whose state is sharded over the stage's data-parallel
ranks, and whose communication overlaps with computation (ZeRO stage 1; Rajbhandari et al., 2020;
Yang et al. (Holmes), section 4.1). Does NOT clip or average gradients, or schedule learning rates.

    optimizer = ShardedOptimizer(stage_model, torch.optim.AdamW(...), group)
    optimizer.begin_step(backwards=4)      # then four forwards and backwards
    optimizer.step(scale)                  # the next forward may begin at once

`p.grad` is None between backwards: gradients are in flat fp32 memory. The sum of a bucket begins
when its last backward is done, except in the first step, which counts how often a backward adds to
each gradient. As in torch, a parameter that has no gradient on any rank is not updated, and
infinite and NaN gradients are used.

With `sums`, a summation service sums gradients. Then every rank keeps the state of all parameters
and updates them, but norms and snapshots are the same, bit for bit. Without overlap, results are
bit-identical. On the host, gradients are summed in rank order (Rule 1).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from roadtrain.errors import DeadlineError, LoopError, StoreError
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.stages.bucket_state import BucketState, ShardedPieces
from roadtrain.stages.data_group import DataGroup, RankCollectives, SharedCopies
from roadtrain.stages.flat_layout import StageParameters, lay_out, views_of_all
from roadtrain.stages.forward_waits import ForwardWaits
from roadtrain.stages.gradient_hooks import GradientHooks
from roadtrain.stages.gradient_sum import GradientSum
from roadtrain.stages.op_queue import (
    DEPTH,
    HINT,
    PATIENCE,
    CollectiveQueue,
    Pending,
    QueuedCollective,
    SideStream,
)
from roadtrain.stages.pieces import Extent, Piece
from roadtrain.stages.same_start import differ, digest, pair, sync_start
from roadtrain.stages.tensor import TensorParallel
from roadtrain.stages.tensor_pieces import TensorPieces
from roadtrain.units import MIB


@dataclass(frozen=True)
class ShardedOptions:
    """The options of a ShardedOptimizer.

    `bucket_bytes`: bytes of fp32 gradients per collective operation. `overlap`: whether
    communication overlaps with computation. `label`: this stage's name in errors. `split`: the
    tensor parallelism of the layers; None if tp is 1. `sums`: the service that sums gradients;
    None: the group's ranks sum them.
    """

    bucket_bytes: int = 16 * MIB
    overlap: bool = True
    label: str = "the stage"
    split: TensorParallel | None = None
    sums: GradientSum | None = None


class ShardedOptimizer:
    """The StageOptimizer (stage_optimizer.py) of a stage whose parameters stay on the GPU or CPU.
    Collective.

    model: the stage, with its parameters' names of the whole model. optimizer: the user's optimizer
    over this stage's parameters; its groups are read at each step, but its `step` never runs.
    group: the stage's data-parallel ranks; None for a single rank. shared: for each set of stages
    that share parameters with this stage, (the parameters' names, the group of their copies), in
    the same order on all ranks. blocks: modules that wait for all of their parameters at once.
    masters: parameter name -> fp32 values, for parameters of a narrower dtype.

    Raises RuleError if the optimizer's update is not elementwise, ModelError if parameters are
    unsupported or differ between ranks, and ConfigError for an unsupported group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        shared: Sequence[tuple[Sequence[str], SharedCopies]] = (),
        blocks: Iterable[nn.Module] = (),
        masters: Mapping[str, torch.Tensor] = {},
        options: ShardedOptions = ShardedOptions(),
        report: Callable[[str], None] = print,
    ) -> None:
        self.options, self.optimizer = options, optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.steps_done = 0
        self.rules = rules_for(optimizer)
        self._group_sizes = _group_sizes(optimizer)
        self.parameters = StageParameters(model, optimizer)
        self.group, self.sums = DataGroup(group, self.parameters.device), options.sums
        trainable = self.parameters.trainable
        links = [([name for name in names if name in trainable], c) for names, c in shared]
        self.links = [(names, copies) for names, copies in links if names]
        self.layout = lay_out(
            self.parameters.specs,
            self.group.width,
            options.bucket_bytes,
            {name: i for i, (names, _) in enumerate(self.links) for name in names},
            [copies.widths for _, copies in self.links],
        )
        self._make_memory(masters, report)
        self.side = SideStream(self.parameters.device)
        self.queue = CollectiveQueue(options.label, self.group.deadline_s, self.side.running)
        self.away: set[int] = set()  # numbers of buckets whose new values have not arrived yet
        self._reduced = False  # whether the sums of all gradients of the step have been queued
        # for each parameter, whether it has a gradient on any rank in this step
        self._has_gradient: list[bool] = []
        params = list(self.parameters.trainable.values())
        self.hooks = GradientHooks(self.layout, params, self._grad_views, self._reduce, self._wait)
        numbers = dict(zip(params, self.layout.buckets_of))
        self.waits = ForwardWaits(model, blocks, numbers, self._wait)
        self._report_exceptions(report)

    def _make_memory(
        self, masters: Mapping[str, torch.Tensor], report: Callable[[str], None]
    ) -> None:
        layout, device = self.layout, self.parameters.device
        values = self.parameters.flatten(layout)
        trainable, frozen = self.parameters.trainable, self.parameters.frozen
        wide = {name: masters[name].reshape(-1) for name in trainable if name in masters}
        self._sync_start(values, wide, report)
        grads = [torch.zeros(run.numel, device=device) for run in layout.runs]
        self._grad_views = views_of_all(layout, grads)
        hypers = self._hyperparameters()
        names = [spec.name for spec in layout.params]
        firsts = {i: wide[name] for i, name in enumerate(names) if name in wide}
        self.states = []
        for b in layout.buckets:
            part = slice(b.start, b.stop)
            state = BucketState(
                b,
                self.group.rank,
                values[b.run][part],
                grads[b.run][part],
                self.rules[b.group],
                whole=self.sums is not None,
            )
            state.begin(hypers[b.group], firsts)
            self.states.append(state)
        rank, width = self.group.rank, self.group.width
        who = f"{self.options.label}, rank {rank} of {self.group}"
        own = ShardedPieces(self.states, names, frozen, rank, width, who)
        split = self.options.split
        self.pieces = own if split is None else TensorPieces(own, split)
        exchanges = self.group.exchanges and self.sums is None
        largest = max((b.numel for b in layout.buckets), default=0) * exchanges
        self._arriving = [torch.empty(largest, device=device) for _ in range(DEPTH + 1)]

    def _sync_start(
        self,
        values: Sequence[torch.Tensor],
        wide: Mapping[str, torch.Tensor],
        report: Callable[[str], None],
    ) -> None:
        """Make initial values the same on all ranks, and in all stages that share parameters.
        values: one flat tensor per run of the layout. wide: parameter name -> fp32 values."""
        layout = self.layout
        frozen = {n: p.detach() for n, p in self.parameters.frozen.items() if p.numel()}
        shapes = repr([(n, p.shape, p.dtype) for n, p in (*frozen.items(), *wide.items())])
        everything = [*values, *frozen.values(), *wide.values()]
        who = f"{self.options.label}, {self.group}"
        sync_start(self.group, who, layout.describe() + shapes, everything, report)
        for i, (names, copies) in enumerate(self.links):
            common = [values[run] for run in layout.shared_runs(i)]
            common += [wide[name] for name in names if name in wide]
            who = f"{self.options.label}, copies of {names[0]!r}"
            sync_start(copies, who, layout.describe(i), common, report)

    def _report_exceptions(self, report: Callable[[str], None]) -> None:
        """Report gradient sums that are not in rank order, and updates on the host for lack of a
        GPU kernel."""
        label, device = self.options.label, self.parameters.device
        if self.sums is None and not self.group.exact:
            report(f"{label}: the device's own library determines the order of gradient sums")
        here = {s.rule.name for s in self.states if s.where != device}
        if here:
            report(
                f"{label}: updates with {', '.join(sorted(here))} run on the host, which also holds"
                f" their state: there is no kernel for {device}"
            )

    # a step

    def begin_step(self, backwards: int) -> None:
        """Begin a step of this number of backwards. Raises LoopError if gradients of the previous
        step are unused."""
        if any(self.hooks.counts) or self._reduced:
            raise LoopError(
                f"{self._step}: begin_step() was called again before step() used the gradients",
                hint="call step() once per step",
            )
        self.hooks.backwards = backwards if self.options.overlap else 0

    def sum_squares(self) -> float:
        """Return the float64 sum of the squares of the summed gradients in this rank's shard;
        infinite or NaN if a gradient is. Gradients of shared parameters count only in the first
        stage."""
        self._finish_gradients()
        self._settle("the sum of the gradients")
        split = self.options.split
        own = [split is None or split.counts(spec.name) for spec in self.layout.params]
        return sum(state.sum_squares(own) for state in self.states if self._counts(state))

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters with `scale` times the gradients, and clear the gradients. The
        update may continue while the next forward runs; the next call that waits for the update
        raises its errors."""
        self._refuse_strays()
        hypers = self._hyperparameters()
        self._finish_gradients()
        self._agree_on_step(hypers, scale)
        began = self.side.mark()
        for index in reversed(self.hooks.order):
            state, has_gradient = self.states[index], self._has_gradient.__getitem__
            update = partial(state.update, hypers[state.bucket.group], scale, has_gradient)
            self._gather(index, began, update)
        self.steps_done += 1
        # schedulers read this attribute
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.hooks.forget()
        self._reduced = False
        self.waits.learn()
        if not self.options.overlap:
            self.wait_parameters()

    def wait_parameters(self) -> None:
        """Wait until the parameters have the values of the previous step. Call this before reading
        them outside of a forward."""
        self._wait(None)

    def settle(self) -> None:
        """Wait until all work of the previous step has ended."""
        self._settle("the end of what is under way")
        self.wait_parameters()

    def _settle(self, what: str) -> None:
        """Wait until all queued operations have ended, also on a GPU. what: the name of the awaited
        result, for errors."""
        self.queue.wait_all(f"{self._step}: {what}")
        self._join(what)

    def _join(self, what: str) -> None:
        deadline_s = PATIENCE * self.group.deadline_s
        if not self.side.join(deadline_s):
            raise DeadlineError(
                f"{self.options.label}: waited {deadline_s:g} s for {self._step}: {what}, over"
                f" {self.group}",
                hint=HINT,
            )

    @property
    def _step(self) -> str:
        return f"step {self.steps_done}"

    def _hyperparameters(self) -> list[tuple[float, ...]]:
        return [rule.hyper(group) for rule, group in zip(self.rules, self.param_groups)]

    def _counts(self, state: BucketState) -> bool:
        link = state.bucket.link
        return link is None or self.links[link][1].counts

    def _refuse_strays(self) -> None:
        if (now := _group_sizes(self.optimizer)) != self._group_sizes:
            raise LoopError(
                f"{self._step}: the optimizer's groups have {now} parameters, but had"
                f" {self._group_sizes} when training began",
                hint="pass all parameters at the start, and freeze parameters only afterwards",
            )
        for name, p in self.parameters.late.items():
            if p.grad is not None:
                raise LoopError(
                    f"{self._step}: parameter {name!r} was frozen at the start, but has a gradient",
                    hint="let the parameter require gradients at the start; freeze it afterwards",
                )
        for name, p in self.parameters.trainable.items():
            if p.grad is not None:
                raise LoopError(
                    f"{self._step}: the gradient of {name!r} was set by hand, so it is not summed",
                    hint="let backward() compute the gradients",
                )

    def _wait(self, buckets: Collection[int] | None) -> None:
        self.queue.check()
        if not self.away and not self.side.marks:
            return
        needed = set(range(len(self.states)) if buckets is None else buckets)
        if not self.away.isdisjoint(needed):
            what = f"step {self.steps_done - 1}: its parameters"
            self.queue.wait(lambda: self.away.isdisjoint(needed), what)
        self.side.wait_for(needed)

    # gradients

    def _name(self, operation: str, index: int, over: RankCollectives) -> str:
        bucket = f"bucket {index} of {len(self.states)}"
        return f"{self._step}: the {operation} of {bucket} over {over}"

    def _reduce(self, index: int) -> None:
        """Queue the sum of a bucket whose gradients are complete on this rank."""
        if self.sums is not None:
            self._sum(index, self.sums)
            return
        state, made = self.states[index], self.side.mark()

        def run() -> Iterator[Pending | None]:
            self.side.after(made)
            memory = self._arriving.pop()
            arrived = memory[: state.grads.numel()]
            yield self.group.reduce_scatter(state.grads, arrived)
            self.group.sum_arrived(state.grads, arrived)
            self._arriving.append(memory)

        self.queue.put(QueuedCollective(self._name("reduce-scatter", index, self.group), run()))

    def _sum(self, index: int, sums: GradientSum) -> None:
        grads, made = self.states[index].grads, self.side.mark()
        identity = f"the gradients of bucket {index} of {self.options.label}"

        def run() -> Iterator[Pending]:
            self.side.after(made)
            under_way = sums.sum(index, identity, grads)
            yield under_way
            grads.copy_(under_way.wait())  # a copy: the next step overwrites `grads`

        self.queue.put(QueuedCollective(self._name("sum", index, self.group), run()))

    def _finish_gradients(self) -> None:
        """Queue the remaining gradient sums, and the exchanges with stages that share
        parameters."""
        if self._reduced:
            return
        self._reduced = True
        self.hooks.finish()
        self._has_gradient = [count > 0 for count in self.hooks.counts]
        self._agree_on_gradients(self._has_gradient)
        for link, (_, copies) in enumerate(self.links):
            for index in self.layout.shared_buckets(link):
                self._exchange(index, copies)

    def _agree_on_gradients(self, has: list[bool]) -> None:
        """Queue an update of `has`, which says whether each parameter has a gradient on this rank,
        so that it says so for any rank of the stage, and of other stages with a copy."""
        positions = {spec.name: i for i, spec in enumerate(self.layout.params)}
        groups: list[tuple[RankCollectives, list[int]]] = [(self.group, list(range(len(has))))]
        groups += [(copies, [positions[n] for n in names]) for names, copies in self.links]
        for group, own in groups:
            if not own:
                continue

            def flags(own: list[int] = own) -> torch.Tensor:
                return torch.tensor([has[i] for i in own], dtype=torch.uint8)

            def end(largest: list[int], own: list[int] = own) -> None:
                for i, flag in zip(own, largest, strict=True):
                    has[i] = bool(flag)

            what = f"{self._step}: which parameters have gradients, over {group}"
            self._agree(what, flags, end, group)

    def _agree(
        self,
        what: str,
        values: Callable[[], torch.Tensor],
        end: Callable[[list[Any]], None],
        over: RankCollectives | None = None,
    ) -> None:
        """Queue a call of `end` with the elementwise maximum of `values()` over the ranks of `over`
        (default: of the stage). what: the operation's name in errors."""

        def run() -> Iterator[Pending | None]:
            # allocated here: memory belongs to the stream of the thread that allocates it
            made = values().to(self.parameters.device)
            yield (over or self.group).all_max(made)
            end(made.tolist())

        self.queue.put(QueuedCollective(what, run(), alone=True))

    def _exchange(self, index: int, copies: SharedCopies) -> None:
        bucket, own = self.states[index].bucket, self.states[index].own_grads

        def run() -> Iterator[Pending]:
            # allocated here: memory belongs to the stream of the thread that allocates it
            arrived = torch.empty(len(copies.widths) - 1, own.numel(), device=own.device)
            yield copies.exchange(bucket, own, arrived)
            copies.sum_arrived(own, arrived)

        what = self._name("exchange between stages", index, copies)
        self.queue.put(QueuedCollective(what, run(), alone=True))

    # updates

    def _agree_on_step(self, hypers: Sequence[tuple[float, ...]], scale: float) -> None:
        """Queue a check that all ranks update with the same hyperparameters and scale, since their
        shards would otherwise belong to different models."""
        step, own = self._step, digest(repr((hypers, scale)).encode())

        def end(largest: list[list[int]]) -> None:
            if any(differ(largest)):
                raise LoopError(
                    f"{step}: the ranks of {self.group} have different hyperparameters or scales;"
                    f" this rank has {hypers} and {scale}",
                    hint="run the same loop on every rank; clip by the norm of the whole job",
                )

        what = f"{step}: the agreement on hyperparameters over {self.group}"
        self._agree(what, lambda: pair(own), end)

    def _gather(self, index: int, made: torch.Event | None, prepare: Callable[[], None]) -> None:
        """Queue a call of `prepare`, which computes this rank's values of a bucket after the event
        `made`, and then the bucket's all-gather."""
        self.away.add(index)

        def run() -> Iterator[Pending | None]:
            self.side.after(made)
            prepare()
            yield None if self.sums else self.group.all_gather(self.states[index].values)
            self.side.leave_mark(index)
            self.away.discard(index)

        self.queue.put(QueuedCollective(self._name("all-gather", index, self.group), run()))

    # state

    def extents(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that this rank provides."""
        return self.pieces.extents()

    def needed(self) -> list[Extent]:
        """Return the extents (ranges of parameter elements) that `load` must receive on this
        rank."""
        return self.pieces.needed()

    def piece(self, extent: Extent) -> Piece:
        """Wait for the previous step, and return a copy of the values and optimizer state of
        `extent`. Raises StoreError if this rank does not keep all of its elements."""
        self._settle(f"the state of {extent.name!r}")
        return self.pieces.piece(extent)

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """Replace parameter values and optimizer state by those of `pieces`. Pieces without
        optimizer state reset it. If a piece is missing on any rank, all ranks raise StoreError.

        steps_done: the number of steps that the job has taken with these values.
        """
        self._settle("the load of a state")
        wrong: StoreError | None = None
        try:
            self.pieces.take(pieces, self._hyperparameters())
        except StoreError as error:
            wrong = error
            with contextlib.suppress(StoreError):  # other ranks wait for this rank's pieces
                deque(pieces, maxlen=0)
        what, failed = f"the load of step {steps_done} over {self.group}", [wrong is not None]
        self._agree(what, lambda: torch.tensor(failed, dtype=torch.uint8), failed.extend)
        self._settle(what)
        if failed[-1]:
            raise wrong or StoreError(f"{what}: a part of another rank's state is missing")
        loaded = self.side.mark()
        for index, state in enumerate(self.states):
            self._gather(index, loaded, state.publish)
        self.wait_parameters()
        self.steps_done = steps_done

    def abandon(self) -> None:
        """Drop all pending work after an error, without waiting. The queue's thread ends after the
        operations in flight, or with the process."""
        self.hooks.close()
        self.waits.close()
        self.queue.abandon()

    def close(self) -> None:
        """Wait for pending work and end the threads. Raises an error of the queue that no call has
        raised yet."""
        self.hooks.close()
        self.waits.close()
        self.queue.close()
        self._join("the end of what is under way")
        if self.sums is not None:
            self.sums.close()


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
