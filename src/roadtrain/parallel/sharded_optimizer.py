"""ShardedOptimizer: a stage's optimizer, its state cut over the stage's data-parallel ranks, its
communication beside the computing (ZeRO stage 1 with overlap; Rajbhandari et al., 2020; Yang et
al., section 4.1).

    optimizer = ShardedOptimizer(stage_model, torch.optim.AdamW(...), group)
    optimizer.begin_step(backwards=4)      # then four forwards and backwards
    optimizer.step(scale)                  # the next forward may begin at once

Gradients are gathered in flat fp32 memory as backward makes them; `p.grad` is None between
backwards. When the last backward has made all of a bucket, its reduce-scatter begins; after `step`
each rank updates its share by the rules of roadtrain's servers, and the all-gather of the new
values begins. A block of the next forward waits for its own parameters. The first step shows which
buckets go first, and does not overlap. A parameter that got no gradient on any rank is left as it
is, as by torch.

Without overlap the same operations run inside `step`, with the same bits. With two and more ranks
on the host sums are in rank order (Rule 1). An infinite or NaN gradient is applied, as by torch;
`sum_squares` shows it. Does NOT clip, average, or know about schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from roadtrain.errors import LoopError, ModelError, StoreError
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.parallel.bucket_state import BucketState
from roadtrain.parallel.courier import UNDER_WAY, Courier, CourierJob, Pending
from roadtrain.parallel.data_group import DataGroup, deadline_of
from roadtrain.parallel.flat_layout import lay_out
from roadtrain.parallel.forward_waits import ForwardWaits
from roadtrain.parallel.gradient_hooks import GradientHooks
from roadtrain.parallel.lacking import Lacking
from roadtrain.parallel.pieces import VALUE, Extent, Piece
from roadtrain.parallel.same_start import StartingRanks, begin_alike, differ, digest, pair
from roadtrain.parallel.shared_copies import SharedCopies
from roadtrain.parallel.side_stream import SideStream
from roadtrain.parallel.stage_parameters import StageParameters, views_of
from roadtrain.units import MIB


@dataclass(frozen=True)
class ShardedOptions:
    """`bucket_bytes`: of fp32 gradients that travel at once. `overlap`: communication runs beside
    the computing, else inside `step`. `label`: this stage's name in errors. `counts(name)`: whether
    `sum_squares` has the parameter's gradient; None: it has all (ranks of a tensor group have some
    alike, which one of them counts)."""

    bucket_bytes: int = 16 * MIB
    overlap: bool = True
    label: str = "the stage"
    counts: Callable[[str], bool] | None = None


class ShardedOptimizer:
    """A StageOptimizer (stage_optimizer.py).

    models: the stage, or its virtual stages' parts, with the whole model's names. optimizer: the
    user's own, of this stage's parameters; its groups are read at each step and its own step is
    never run. group: the stage's data-parallel ranks; None: there is one. shared: parameters that
    other stages have copies of. blocks: modules that wait for their parameters as one, found as
    `place` finds them if not given.

    Collective over the group. Raises RuleError for an optimizer that is not elementwise,
    ModelError for parameters that cannot be or that differ, ConfigError for a group that cannot.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        group: torch.distributed.ProcessGroup | None = None,
        *,
        shared: Mapping[str, SharedCopies] = {},
        blocks: Iterable[nn.Module] | None = None,
        options: ShardedOptions = ShardedOptions(),
        report: Callable[[str], None] = print,
    ) -> None:
        stage = [models] if isinstance(models, nn.Module) else list(models)
        self.options, self.optimizer = options, optimizer
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.steps_done = 0
        self.rules = rules_for(optimizer)
        self._group_sizes = _group_sizes(optimizer)
        self.parameters = StageParameters(stage, optimizer)
        self.group = DataGroup(group, self.parameters.device)
        self.links = _links(shared, self.parameters.trainable, self.group)
        self.layout = lay_out(
            self.parameters.specs,
            self.group.width,
            options.bucket_bytes,
            {name: i for i, (names, _) in enumerate(self.links) for name in names},
            [copies.widths for _, copies in self.links],
        )
        self._make_memory(report)
        self.side = SideStream(self.parameters.device)
        self.courier = Courier(options.label, self.group.deadline_s, self.side.running)
        self._away: set[int] = set()  # buckets whose new values are not here yet
        self._order: list[int] | None = None  # what the first rank's first step showed
        self._order_asked = False
        self._reduced = False  # the step's gradients were handed on, all of them
        self._has_gradient: list[bool] = []  # of the step, on any rank
        params = list(self.parameters.trainable.values())
        self.hooks = GradientHooks(
            self.layout, params, self._grad_views, self._reduce, self._wait, self._take_order
        )
        numbers = dict(zip(params, self.layout.buckets_of))
        self.waits = ForwardWaits(stage, blocks, numbers, self._wait)
        self._say_what_differs(report)

    def _make_memory(self, report: Callable[[str], None]) -> None:
        """Values, gradients, what arrives, and the state of this rank's shares."""
        layout, device = self.layout, self.parameters.device
        values = self.parameters.flatten(layout)
        frozen = {n: p.detach() for n, p in self.parameters.frozen.items() if p.numel()}
        shapes = repr([(n, p.shape, p.dtype) for n, p in frozen.items()])
        everything = [*values, *frozen.values()]
        who, deadline_s = f"{self.options.label}, {self.group}", self.group.deadline_s
        alike = StartingRanks(self.group, device, who, deadline_s)
        begin_alike(alike, layout.whole + shapes, everything, report)
        for i, (names, copies) in enumerate(self.links):
            common = [values[run] for run in layout.shared_runs(i)]
            who = f"{self.options.label}, copies of {names[0]!r}"
            alike = StartingRanks(copies, device, who, deadline_of(copies.group, device))
            begin_alike(alike, layout.common(i), common, report)
        grads = [torch.zeros(run.numel, device=device) for run in layout.runs]
        views = [v for g, run in zip(grads, layout.runs) for v in views_of(g, run, layout.params)]
        empty = torch.empty(0, device=device)
        held = dict(views)
        self._grad_views = [
            held.get(i, empty.view(spec.shape) if not spec.numel else empty)
            for i, spec in enumerate(layout.params)
        ]
        hypers = self._hyperparameters()
        self.states = []
        for b in layout.buckets:
            group, part = layout.runs[b.run].group, slice(b.start, b.stop)
            state = BucketState(
                b, self.group.rank, values[b.run][part], grads[b.run][part], self.rules[group]
            )
            state.begin(hypers[group])
            self.states.append(state)
        largest = max((b.numel for b in layout.buckets), default=0) * self.group.exchanges
        self._arriving = [torch.empty(largest, device=device) for _ in range(UNDER_WAY + 1)]

    def _say_what_differs(self, report: Callable[[str], None]) -> None:
        """What is not as it may be expected (Rules 1 and 6)."""
        label, device = self.options.label, self.parameters.device
        if not self.group.exact:
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
        where the last step's gradients were neither used nor dropped."""
        if any(self.hooks.counts) or self._reduced:
            raise LoopError(
                f"{self._step}: it begins again with gradients that no update took",
                hint="step(), or zero_grad() to drop them",
            )
        self.hooks.begin(backwards if self.options.overlap else 0)

    def sum_squares(self) -> float:
        """See StageOptimizer. In float64; of copies the first stage's counts. Infinite or NaN
        where a gradient is."""
        self._finish_gradients()
        self.courier.wait_all(f"{self._step}: the sum of the gradients")
        self.side.join()
        counts = self.options.counts or _always
        own = [counts(spec.name) for spec in self.layout.params]
        return sum(state.sum_squares(own) for state in self.states if self._counts(state))

    def step(self, scale: float = 1.0) -> None:
        """See StageOptimizer. What goes wrong later is raised by what waits for it."""
        self._refuse_strays()
        hypers = self._hyperparameters()
        self._finish_gradients()
        self._agree_on_step(hypers, scale)
        began = self.side.mark()
        for index in reversed(self.hooks.order):
            group = self.layout.runs[self.states[index].bucket.run].group
            update = partial(self.states[index].update, hypers[group], scale)
            self._away.add(index)
            self._gather(index, partial(self._update, update, self._has_gradient, began))
        self.steps_done += 1
        self._forget()
        self.waits.learn()
        if not self.options.overlap:
            self.wait_parameters()

    def zero_grad(self) -> None:
        """Drops the gradients of a step that is not taken. Collective, inside a step."""
        if self.hooks.open:
            self._finish_gradients()
            self.courier.wait_all(f"{self._step}: the sum of gradients that are dropped")
            self._forget()

    def wait_parameters(self) -> None:
        """The last step's parameters are here, also for who reads them outside of a forward."""
        self._wait(None)

    def settle(self) -> None:
        """See StageOptimizer."""
        self.wait_parameters()
        self.courier.wait_all(f"{self._step}: the end of what is under way")

    @property
    def waiting(self) -> bool:
        """Whether new parameters are still on their way."""
        return bool(self._away)

    @property
    def _step(self) -> str:
        return f"step {self.steps_done}"

    def _hyperparameters(self) -> list[tuple[float, ...]]:
        return [rule.hyper(group) for rule, group in zip(self.rules, self.param_groups)]

    def _counts(self, state: BucketState) -> bool:
        link = state.bucket.link
        return link is None or self.links[link][1].counts

    def _forget(self) -> None:
        self.hooks.forget()
        self._reduced = False

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

    def _wait(self, buckets: Collection[int] | None) -> None:
        self.courier.check()
        if not self._away and not self.side.marks:
            return
        wanted = set(range(len(self.states)) if buckets is None else buckets)
        if not self._away.isdisjoint(wanted):
            what = f"step {self.steps_done - 1}: its parameters"
            self.courier.wait(lambda: self._away.isdisjoint(wanted), what)
        self.side.wait_for(wanted)

    # gradients

    def _name(self, operation: str, index: int) -> str:
        return (
            f"{self._step}: the {operation} of bucket {index} of {len(self.states)}"
            f" over {self.group}"
        )

    def _reduce(self, index: int) -> None:
        """The bucket's gradients are whole on this rank."""
        state, made = self.states[index], self.side.mark()
        arrived: list[torch.Tensor] = []

        def begin() -> Pending | None:
            self.side.after(made)
            arrived.append(self._arriving.pop())
            return self.group.reduce_scatter(state.grads, arrived[0][: state.grads.numel()])

        def end() -> None:
            self.group.sum_arrived(state.grads, arrived[0][: state.grads.numel()])
            self._arriving.append(arrived[0])

        self.courier.do(CourierJob(self._name("reduce-scatter", index), begin, end))

    def _finish_gradients(self) -> None:
        """Hand on what backward left; which parameters have a gradient; copies of other stages."""
        if self._reduced:
            return
        self._reduced = True
        self.hooks.finish()
        self._has_gradient = self.hooks.has_gradient()
        self._agree_on_gradients(self._has_gradient)
        for link, (_, copies) in enumerate(self.links):
            for index in self.layout.shared_buckets(link):
                self._exchange(index, copies)
        if self.options.overlap and self.states and not self._order_asked:
            self._agree_on_order()

    def _agree_on_gradients(self, has: list[bool]) -> None:
        """Of a parameter that any rank has a gradient of, or any copy's."""
        positions = {spec.name: i for i, spec in enumerate(self.layout.params)}
        groups: list[tuple[Any, list[int]]] = [(self.group, list(range(len(has))))]
        groups += [(copies, [positions[n] for n in names]) for names, copies in self.links]
        for group, own in groups:
            if not own:
                continue
            flags = torch.empty(len(own), dtype=torch.uint8, device=self.parameters.device)

            def begin(group: Any = group, own: list[int] = own, flags: Any = flags) -> Any:
                flags.copy_(torch.tensor([has[i] for i in own], dtype=torch.uint8))
                return group.any_of(flags)

            def end(own: list[int] = own, flags: torch.Tensor = flags) -> None:
                for i, flag in zip(own, flags.tolist()):
                    has[i] = bool(flag)

            what = f"{self._step}: which parameters have gradients, over {self.group}"
            self.courier.do(CourierJob(what, begin, end, alone=True))

    def _exchange(self, index: int, copies: SharedCopies) -> None:
        bucket, own = self.states[index].bucket, self.states[index].own_grads
        arrived: list[torch.Tensor] = []

        def begin() -> Pending:
            # made here: memory belongs to the stream of the thread that makes it
            arrived.append(torch.empty(len(copies.widths) - 1, own.numel(), device=own.device))
            return copies.exchange(bucket, own, arrived[0])

        def end() -> None:
            copies.sum_arrived(own, arrived[0])

        what = self._name("exchange between stages", index)
        self.courier.do(CourierJob(what, begin, end, alone=True))

    # the order of buckets

    def _agree_on_order(self) -> None:
        """The order in which buckets became whole on the first rank."""
        self._order_asked = True
        order = torch.tensor(self.hooks.seen(), dtype=torch.int64, device=self.parameters.device)

        def end() -> None:
            self._order = order.tolist()

        what = f"{self._step}: the order of buckets over {self.group}"
        self.courier.do(CourierJob(what, partial(self.group.from_first, order), end))

    def _take_order(self) -> None:
        """A step begins."""
        if self._order_asked and self._order != self.hooks.order:
            self.courier.wait(lambda: self._order is not None, "the order of buckets")
            self.hooks.order = list(self._order or ())

    # updates

    def _agree_on_step(self, hypers: Sequence[tuple[float, ...]], scale: float) -> None:
        """Ranks that updated their shares differently would train two models."""
        said = pair(digest(repr((hypers, scale)).encode())).to(self.parameters.device)

        def end() -> None:
            if any(differ(said)):
                raise LoopError(
                    f"{step}: the ranks of {self.group} have different hyperparameters or scales;"
                    f" this one has {hypers} and {scale}",
                    hint="every rank runs the same loop; clip by the norm of the whole job",
                )

        step = self._step
        what = f"{step}: the agreement on hyperparameters over {self.group}"
        self.courier.do(CourierJob(what, partial(self.group.any_of, said), end, alone=True))

    def _update(
        self,
        update: Callable[[Callable[[int], bool]], None],
        has_gradient: Sequence[bool],
        began: torch.Event | None,
    ) -> None:
        self.side.after(began)
        update(has_gradient.__getitem__)

    def _gather(self, index: int, prepare: Callable[[], None]) -> None:
        """After `prepare` this rank's share of the bucket is new; bring the others'."""

        def begin() -> Pending | None:
            prepare()
            return self.group.all_gather(self.states[index].values)

        def end() -> None:
            self.side.leave_mark(index)
            self._away.discard(index)

        self.courier.do(CourierJob(self._name("all-gather", index), begin, end))

    # state

    def extents(self) -> list[Extent]:
        """See StageOptimizer. Frozen parameters are cut evenly over the ranks."""
        own = [self._extent(state, i) for state in self.states for i in range(len(state.spans))]
        return [*own, *(e for e in self._frozen_extents() if e.numel)]

    @cached_property
    def _kept(self) -> dict[str, list[tuple[BucketState, int]]]:
        """Where this rank has parts of each parameter that trains: spans of buckets."""
        out: dict[str, list[tuple[BucketState, int]]] = {}
        for state in self.states:
            for i, span in enumerate(state.spans):
                out.setdefault(self.layout.params[span.param].name, []).append((state, i))
        return out

    def _extent(self, state: BucketState, span: int) -> Extent:
        s = state.spans[span]
        name = self.layout.params[s.param].name
        return Extent(name, s.origin, s.origin + s.stop - s.start)

    def _frozen_extents(self) -> list[Extent]:
        rank, width = self.group.rank, self.group.width
        return [
            Extent(name, p.numel() * rank // width, p.numel() * (rank + 1) // width)
            for name, p in self.parameters.frozen.items()
        ]

    def piece(self, extent: Extent) -> Piece:
        """See StageOptimizer. Raises StoreError for what this rank does not keep."""
        self.courier.wait_all(f"{self._step}: the state of {extent.name!r}")
        self.side.join()
        if (frozen := self.parameters.frozen.get(extent.name)) is not None:
            values = frozen.detach().reshape(-1)[extent.start : extent.stop]
            return Piece(extent, {VALUE: values.to("cpu", torch.float32, copy=True)}, {})
        for state, i in self._kept.get(extent.name, ()):
            kept = self._extent(state, i)
            if kept.start <= extent.start and extent.stop <= kept.stop:
                return state.piece(i, extent.name, extent.start, extent.stop)
        raise StoreError(
            f"{self.options.label}, rank {self.group.rank} of {self.group}: elements"
            f" [{extent.start}, {extent.stop}) of {extent.name!r} are not in one of its extents"
        )

    def wanted(self) -> list[Extent]:
        """See StageOptimizer. Frozen parameters are wanted whole by every rank."""
        own = [self._extent(state, i) for state in self.states for i in range(len(state.spans))]
        frozen = [Extent(n, 0, p.numel()) for n, p in self.parameters.frozen.items() if p.numel()]
        return [*own, *frozen]

    def load(self, pieces: Iterable[Piece], steps_done: int) -> None:
        """See StageOptimizer. Pieces of values alone begin with the state of a first step. Raises
        StoreError on all ranks where one lacks a part."""
        self.courier.wait_all("the load of a state")
        self.side.join()
        wrong: StoreError | None = None
        try:
            self._load_own(pieces)
        except StoreError as error:
            wrong = error
        failed = torch.tensor([wrong is not None], dtype=torch.uint8).to(self.parameters.device)
        what = f"the load of step {steps_done} over {self.group}"
        self.courier.do(CourierJob(what, partial(self.group.any_of, failed), alone=True))
        self.courier.wait_all(what)
        self.side.join()
        if bool(failed.item()):
            raise wrong or StoreError(f"{what}: another rank lacks a part of its state")
        taken = self.side.mark()
        for index, state in enumerate(self.states):
            self._away.add(index)
            self._gather(index, partial(self._publish, state, taken))
        self.wait_parameters()
        self.steps_done = steps_done

    def _publish(self, state: BucketState, taken: torch.Event | None) -> None:
        self.side.after(taken)
        state.publish()

    @torch.no_grad()
    def _load_own(self, pieces: Iterable[Piece]) -> None:
        lacking = Lacking(self.wanted())
        hypers = self._hyperparameters()
        for piece in pieces:
            extent = piece.extent
            lacking.came(extent)
            if (frozen := self.parameters.frozen.get(extent.name)) is not None:
                flat = frozen.detach().reshape(-1)  # a copy where it is not contiguous
                flat[extent.start : extent.stop].copy_(piece.arrays[VALUE])
                if not frozen.is_contiguous():
                    frozen.copy_(flat.view(frozen.shape))
            for state, i in self._kept.get(extent.name, ()):
                state.take(i, piece, hypers[self.layout.runs[state.bucket.run].group])
        lacking.check(f"{self.options.label}, rank {self.group.rank} of {self.group}")

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


def _links(
    shared: Mapping[str, SharedCopies], trainable: Collection[str], group: DataGroup
) -> list[tuple[list[str], SharedCopies]]:
    """The names that each group of stages shares, in an order that is the same everywhere."""
    by_group: dict[int, tuple[list[str], SharedCopies]] = {}
    for name, copies in sorted(shared.items()):
        if (copies.widths[copies.stage], copies.replica) != (group.width, group.rank):
            raise ModelError(
                f"{name!r} is shared by stages of {copies.widths} ranks, where this one is rank"
                f" {copies.replica} of stage {copies.stage}; in its own group it is rank"
                f" {group.rank} of {group.width}",
                hint="the group of copies has the stages' ranks in the order of their own groups",
            )
        if name in trainable:
            by_group.setdefault(id(copies.group), ([], copies))[0].append(name)
    return list(by_group.values())


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _always(name: str) -> bool:
    return True
