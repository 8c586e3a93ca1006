"""GradientHooks: gradients move into flat fp32 memory as backward makes them, and it is known when
a bucket's are whole.

Note: why they are moved. `p.grad` as a view of the flat memory would save no pass: that memory had
to be zeroed each step, and a parameter without a gradient could not be told from one of zeros. The
first gradient of a step is copied while it is in the cache, those of further micro-batches are
added, in fp32 also where parameters are narrower. And nobody can take for the step's gradient what
is the sum of one rank.

Counting: after `backwards` gradients a parameter's is whole, or after a multiple of that, where one
backward adds to it several times (a block in two parts of the stage, reentrant checkpoints). The
first step shows which multiple, so nothing is handed on before its end. Buckets are handed on in
one order, that of a backward through the model's parameters. Does NOT communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import nn

from roadtrain.errors import LoopError
from roadtrain.stages.flat_layout import FlatLayout


class GradientHooks:
    """`views`: of each parameter's gradient. `ready(bucket)` hands a bucket on; `wait(buckets)`
    returns when their gradients may be overwritten. `backwards`: of the step; 0: unknown, nothing
    is whole before `finish`."""

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
        # in which buckets are handed on: a forward's, backwards
        self.order: list[int] = list(reversed(range(len(layout.buckets))))
        # how often one backward adds to each parameter; None until a step has shown it
        self._each: list[int] | None = None
        self.forget()
        self._handles = []
        for i, p in enumerate(params):
            p.grad = None
            hook = partial(self._accumulated, i)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))

    def forget(self) -> None:
        """The step's gradients are used."""
        self.backwards = 0
        self.counts = [0] * len(self.params)  # gradients of each parameter in this step
        # parameters of each bucket that are not whole
        self._lacking = [len({s.param for s in b.spans}) for b in self.layout.buckets]
        self._handed_on: set[int] = set()

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
                self._lacking[bucket] -= 1
            for bucket in self.order[len(self._handed_on) :]:
                if self._lacking[bucket]:
                    break
                self._hand_on(bucket)

    def _check_open(self, i: int) -> None:
        if self._handed_on.isdisjoint(self.layout.buckets_of[i]):
            return
        raise LoopError(
            f"parameter {self.layout.params[i].name!r} gets gradient {self.counts[i] + 1} of a step"
            f" of {self.backwards} backwards, after its sum has begun",
            hint="say how many backwards a step has; where that is right, one adds to the parameter"
            " more often than in the first step: overlap=False",
        )

    def _hand_on(self, bucket: int) -> None:
        self._handed_on.add(bucket)
        self._ready(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """No gradient comes any more in this step: hand on the rest, zeros where there is none."""
        for i, view in enumerate(self.views):
            if self.counts[i] == 0:
                self._wait(self.layout.buckets_of[i])
                view.zero_()
        for bucket in self.order[len(self._handed_on) :]:
            self._hand_on(bucket)
        if self._each is None and self.backwards:
            self._each = [max(1, -(-count // self.backwards)) for count in self.counts]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
