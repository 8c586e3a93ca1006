"""ShardedOptimizer: a stage's optimizer, its state cut over the stage's data-parallel ranks, its
communication beside the computing (ZeRO stage 1 with overlap; Rajbhandari et al., 2020; Yang et
al., section 4.1).

    optimizer = ShardedOptimizer(stage_model, torch.optim.AdamW(...), group)
    optimizer.begin_step(backwards=4)      # then four forwards and backwards
    optimizer.step(scale)                  # the next forward may begin at once

Gradients are gathered in flat fp32 memory as backward makes them; `p.grad` is None between
backwards. When the last backward has made all of a bucket, its reduce-scatter begins; after `step`
each rank updates its share by the rules of roadtrain's servers, and the all-gather of the new
values begins. A block of the next forward waits for its own parameters. The first step shows how
often a backward adds to each parameter, and does not overlap. A parameter that got no gradient on
any rank is left as it is, as by torch.

With `sums` gradients are summed elsewhere and every rank gets the whole sum of a bucket: each keeps
all of the state and updates all, so there is no all-gather (placement `summation`, simulated so).
What a rank counts and tells is its share still: norms and snapshots are the same, bit for bit.

Without overlap the same operations run inside `step`, with the same bits. With two and more ranks
on the host sums are in rank order (Rule 1). An infinite or NaN gradient is applied, as by torch;
`sum_squares` shows it. Does NOT clip, average, or know about schedules.
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

from roadtrain.errors import LoopError, StoreError
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.stages.bucket_state import BucketState, ShardedPieces
from roadtrain.stages.courier import UNDER_WAY, Courier, CourierJob, Pending, SideStream
from roadtrain.stages.data_group import DataGroup, RanksTogether, SharedCopies
from roadtrain.stages.flat_layout import StageParameters, lay_out, views_of_all
from roadtrain.stages.forward_waits import ForwardWaits
from roadtrain.stages.gradient_hooks import GradientHooks
from roadtrain.stages.gradient_sum import GradientSum
from roadtrain.stages.pieces import Extent, Piece
from roadtrain.stages.same_start import differ, digest, pair, sync_start
from roadtrain.stages.tensor import TensorParallel
from roadtrain.stages.tensor_pieces import TensorPieces
from roadtrain.units import MIB


@dataclass(frozen=True)
class ShardedOptions:
    """`bucket_bytes`: of fp32 gradients that travel at once. `overlap`: communication runs beside
    the computing, else inside `step`. `label`: this stage's name in errors. `split`: how layers
    are split over a tensor group, whose ranks have some gradients alike, which one of them counts.
    `sums`: sum gradients instead of the group."""

    bucket_bytes: int = 16 * MIB
    overlap: bool = True
    label: str = "the stage"
    split: TensorParallel | None = None
    sums: GradientSum | None = None


class ShardedOptimizer:
    """A StageOptimizer (stage_optimizer.py).

    model: the stage, with the whole model's names. optimizer: the user's own, of this stage's
    parameters; its groups are read at each step and its own step is never run. group: the stage's
    data-parallel ranks; None: there is one. shared: names of parameters that other stages have
    copies of, for each set of stages, in the same order on all of them. blocks: modules that wait
    for their parameters as one. masters: by name, fp32 values of parameters that are narrower.

    Collective over the group. Raises RuleError for an optimizer that is not elementwise,
    ModelError for parameters that cannot be or that differ, ConfigError for a group that cannot.
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
        self.courier = Courier(options.label, self.group.deadline_s, self.side.running)
        self.away: set[int] = set()  # buckets whose new values are not here yet
        self._reduced = False  # the step's gradients were handed on, all of them
        self._has_gradient: list[bool] = []  # of the step, on any rank
        params = list(self.parameters.trainable.values())
        self.hooks = GradientHooks(self.layout, params, self._grad_views, self._reduce, self._wait)
        numbers = dict(zip(params, self.layout.buckets_of))
        self.waits = ForwardWaits(model, blocks, numbers, self._wait)
        self._report_exceptions(report)

    def _make_memory(
        self, masters: Mapping[str, torch.Tensor], report: Callable[[str], None]
    ) -> None:
        """Values, gradients, what arrives, and the state of this rank's shares."""
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
        self._arriving = [torch.empty(largest, device=device) for _ in range(UNDER_WAY + 1)]

    def _sync_start(
        self,
        values: Sequence[torch.Tensor],
        wide: Mapping[str, torch.Tensor],
        report: Callable[[str], None],
    ) -> None:
        """All ranks of the stage, and of stages with copies, have the same first values. values: of
        the runs; wide: fp32 values of narrower parameters."""
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
        """What is not as it may be expected (Rules 1 and 6)."""
        label, device = self.options.label, self.parameters.device
        if self.sums is None and not self.group.exact:
            report(f"{label}: gradients are summed in the order of the device's own library")
        here = {s.rule.name for s in self.states if s.where != device}
        if here:
            report(
                f"{label}: updates of {', '.join(sorted(here))} run on the host, where their state"
                f" is: there is no kernel for {device}"
            )

    # a step

    def begin_step(self, backwards: int) -> None:
        """See StageOptimizer. backwards: of each part of the stage, on this rank. Raises LoopError
        where the last step's gradients were not used."""
        if any(self.hooks.counts) or self._reduced:
            raise LoopError(
                f"{self._step}: it begins again with gradients that no update took",
                hint="call step() once a step",
            )
        self.hooks.backwards = backwards if self.options.overlap else 0

    def sum_squares(self) -> float:
        """See StageOptimizer. In float64; of copies the first stage's counts. Infinite or NaN
        where a gradient is."""
        self._finish_gradients()
        self._settle("the sum of the gradients")
        split = self.options.split
        own = [split is None or split.counts(spec.name) for spec in self.layout.params]
        return sum(state.sum_squares(own) for state in self.states if self._counts(state))

    def step(self, scale: float = 1.0) -> None:
        """See StageOptimizer. What goes wrong later is raised by what waits for it."""
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
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        self.hooks.forget()
        self._reduced = False
        self.waits.learn()
        if not self.options.overlap:
            self.wait_parameters()

    def wait_parameters(self) -> None:
        """The last step's parameters are here, also for who reads them outside of a forward."""
        self._wait(None)

    def settle(self) -> None:
        """See StageOptimizer."""
        self._settle("the end of what is under way")
        self.wait_parameters()

    def _settle(self, what: str) -> None:
        """All that was handed in has ended; what the caller's thread does now comes after it."""
        self.courier.wait_all(f"{self._step}: {what}")
        self.side.join()

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
                f"{self._step}: the optimizer's groups have {now} parameters, they had"
                f" {self._group_sizes} when training began",
                hint="give the optimizer all parameters at the start, and freeze some of them",
            )
        for name, p in self.parameters.late.items():
            if p.grad is not None:
                raise LoopError(
                    f"{self._step}: parameter {name!r} was frozen when training began and has a"
                    " gradient now",
                    hint="let it require gradients at the start, and freeze it after that",
                )
        for name, p in self.parameters.trainable.items():
            if p.grad is not None:
                raise LoopError(
                    f"{self._step}: the gradient of {name!r} was set by hand, and is in no sum",
                    hint="gradients come from backward()",
                )

    def _wait(self, buckets: Collection[int] | None) -> None:
        self.courier.check()
        if not self.away and not self.side.marks:
            return
        wanted = set(range(len(self.states)) if buckets is None else buckets)
        if not self.away.isdisjoint(wanted):
            what = f"step {self.steps_done - 1}: its parameters"
            self.courier.wait(lambda: self.away.isdisjoint(wanted), what)
        self.side.wait_for(wanted)

    # gradients

    def _name(self, operation: str, index: int, over: RanksTogether) -> str:
        bucket = f"bucket {index} of {len(self.states)}"
        return f"{self._step}: the {operation} of {bucket} over {over}"

    def _reduce(self, index: int) -> None:
        """The bucket's gradients are whole on this rank."""
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

        self.courier.do(CourierJob(self._name("reduce-scatter", index, self.group), run()))

    def _sum(self, index: int, sums: GradientSum) -> None:
        """As `_reduce`, and every rank gets all of it."""
        grads, made = self.states[index].grads, self.side.mark()
        identity = f"the gradients of bucket {index} of {self.options.label}"

        def run() -> Iterator[Pending]:
            self.side.after(made)
            under_way = sums.sum(index, identity, grads)
            yield under_way
            grads.copy_(under_way.wait())  # the next step overwrites them, not the sum

        self.courier.do(CourierJob(self._name("sum", index, self.group), run()))

    def _finish_gradients(self) -> None:
        """Hand on what backward left; which parameters have a gradient; copies of other stages."""
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
        """Of a parameter that any rank has a gradient of, or any copy's."""
        positions = {spec.name: i for i, spec in enumerate(self.layout.params)}
        groups: list[tuple[RanksTogether, list[int]]] = [(self.group, list(range(len(has))))]
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
        over: RanksTogether | None = None,
    ) -> None:
        """`end` of the largest of `values()` over the ranks (None: of the stage's group)."""

        def run() -> Iterator[Pending | None]:
            # made here: memory belongs to the stream of the thread that makes it
            made = values().to(self.parameters.device)
            yield (over or self.group).any_of(made)
            end(made.tolist())

        self.courier.do(CourierJob(what, run(), alone=True))

    def _exchange(self, index: int, copies: SharedCopies) -> None:
        bucket, own = self.states[index].bucket, self.states[index].own_grads

        def run() -> Iterator[Pending]:
            # made here: memory belongs to the stream of the thread that makes it
            arrived = torch.empty(len(copies.widths) - 1, own.numel(), device=own.device)
            yield copies.exchange(bucket, own, arrived)
            copies.sum_arrived(own, arrived)

        what = self._name("exchange between stages", index, copies)
        self.courier.do(CourierJob(what, run(), alone=True))

    # updates

    def _agree_on_step(self, hypers: Sequence[tuple[float, ...]], scale: float) -> None:
        """Ranks that updated their shares differently would train two models."""
        step, said = self._step, digest(repr((hypers, scale)).encode())

        def end(largest: list[list[int]]) -> None:
            if any(differ(largest)):
                raise LoopError(
                    f"{step}: the ranks of {self.group} have different hyperparameters or scales;"
                    f" this one has {hypers} and {scale}",
                    hint="every rank runs the same loop; clip by the norm of the whole job",
                )

        what = f"{step}: the agreement on hyperparameters over {self.group}"
        self._agree(what, lambda: pair(said), end)

    def _gather(self, index: int, made: torch.Event | None, prepare: Callable[[], None]) -> None:
        """After `prepare`, which needs what was `made`, this rank's share of the bucket is new;
        bring the others'."""
        self.away.add(index)

        def run() -> Iterator[Pending | None]:
            self.side.after(made)
            prepare()
            yield None if self.sums else self.group.all_gather(self.states[index].values)
            self.side.leave_mark(index)
            self.away.discard(index)

        self.courier.do(CourierJob(self._name("all-gather", index, self.group), run()))

    # state

    def extents(self) -> list[Extent]:
        """See StageOptimizer. Frozen parameters are cut evenly over the ranks."""
        return self.pieces.extents()

    def needed(self) -> list[Extent]:
        """See StageOptimizer. Frozen parameters are wanted whole by every rank."""
        return self.pieces.needed()

    def piece(self, extent: Extent) -> Piece:
        """See StageOptimizer. Raises StoreError for what this rank does not keep."""
        self._settle(f"the state of {extent.name!r}")
        return self.pieces.piece(extent)

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """See StageOptimizer. Pieces of values alone begin with the state of a first step. Raises
        StoreError on all ranks where one lacks a part."""
        self._settle("the load of a state")
        wrong: StoreError | None = None
        try:
            self.pieces.take(pieces, self._hyperparameters())
        except StoreError as error:
            wrong = error
            with contextlib.suppress(StoreError):  # others wait for what this rank gives
                deque(pieces, maxlen=0)
        what, failed = f"the load of step {steps_done} over {self.group}", [wrong is not None]
        self._agree(what, lambda: torch.tensor(failed, dtype=torch.uint8), failed.extend)
        self._settle(what)
        if failed[-1]:
            raise wrong or StoreError(f"{what}: another rank lacks a part of its state")
        taken = self.side.mark()
        for index, state in enumerate(self.states):
            self._gather(index, taken, state.publish)
        self.wait_parameters()
        self.steps_done = steps_done

    def abandon(self) -> None:
        """See StageOptimizer. The thread ends with what it waits for, or with the process."""
        self.hooks.close()
        self.waits.close()
        self.courier.abandon()

    def close(self) -> None:
        """See StageOptimizer. Raises what went wrong, if nobody heard of it."""
        self.hooks.close()
        self.waits.close()
        self.courier.close()
        self.side.join()
        if self.sums is not None:
            self.sums.close()


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
