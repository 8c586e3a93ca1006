"""GradientHooks: move gradients into flat fp32 memory while backward computes them, and report each
bucket as soon as its gradients are complete. Does NOT communicate.

Note: `p.grad` is not a view of the flat memory, which would have to be zeroed in every step, and in
which a missing gradient would look like zeros.

Counting: usually, each backward adds to a parameter's gradient once. If each adds k times (a module
that several layers use, reentrant checkpoints), the gradient is complete after k times as many
additions. k is counted in the first step, so all buckets of the first step are reported at its end.
Buckets are always reported in the order of a backward through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import nn

from roadtrain.errors import LoopError
from roadtrain.stages.flat_layout import FlatLayout


class GradientHooks:
    """Hooks on the parameters of a stage.

    `views`: for each parameter, a view of the memory of its gradient. `ready`: called with the
    number of each bucket whose gradients are complete. `wait`: called with the numbers of buckets;
    returns when their gradients may be overwritten. `backwards`: the number of backwards in the
    step; if it is 0, no bucket is reported before `finish`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor],
        ready: Callable[[int], None],
        wait: Callable[[Collection[int]], None],
    ) -> None:
        self.layout, self.params, self.views = layout, params, views
        self._ready, self._wait = ready, wait
        # the order in which buckets are reported: the reverse of the forward's order
        self.order: list[int] = list(reversed(range(len(layout.buckets))))
        # number of accumulations of each parameter per backward; None until the first step has
        # ended
        self._each: list[int] | None = None
        self.forget()
        self._handles = []
        for i, p in enumerate(params):
            p.grad = None
            hook = partial(self._accumulated, i)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))

    def forget(self) -> None:
        """Reset the counters for the next step."""
        self.backwards = 0
        self.counts = [0] * len(self.params)  # accumulations of each parameter in this step
        # for each bucket, the number of its parameters whose gradients are not complete
        self._incomplete = [len({s.param for s in b.spans}) for b in self.layout.buckets]
        self._reported: set[int] = set()

    @torch.no_grad()
    def _accumulated(self, i: int, p: nn.Parameter) -> None:
        grad, p.grad = p.grad, None
        if grad is None:
            return
        own, view = self.layout.buckets_of[i], self.views[i]
        self._check_open(i)
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.counts[i] == 0:
            self._wait(own)
            view.copy_(grad)
        else:
            view.add_(grad)
        self.counts[i] += 1
        if self._each is not None and self.counts[i] == self.backwards * self._each[i]:
            for bucket in own:
                self._incomplete[bucket] -= 1
            for bucket in self.order[len(self._reported) :]:
                if self._incomplete[bucket]:
                    break
                self._report(bucket)

    def _check_open(self, i: int) -> None:
        if self._reported.isdisjoint(self.layout.buckets_of[i]):
            return
        raise LoopError(
            f"the sum of the gradients of {self.layout.params[i].name!r} had already begun when"
            f" gradient {self.counts[i] + 1} was added; the step has {self.backwards} backwards",
            hint="check the number of backwards passed to begin_step; if this number is right, some"
            " backwards add more gradients to the parameter than others: use overlap=False",
        )

    def _report(self, bucket: int) -> None:
        self._reported.add(bucket)
        self._ready(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """End a step: set missing gradients to zeros, and report the remaining buckets."""
        for i, view in enumerate(self.views):
            if self.counts[i] == 0:
                self._wait(self.layout.buckets_of[i])
                view.zero_()
        for bucket in self.order[len(self._reported) :]:
            self._report(bucket)
        if self._each is None and self.backwards:
            self._each = [max(1, -(-count // self.backwards)) for count in self.counts]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
