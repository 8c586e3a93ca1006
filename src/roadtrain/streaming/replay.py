"""ForwardState: all state on which a block's forward depends, except arguments and parameters. It
is recorded before the forward, and restored while the block is recomputed in backward.

The state consists of the RNG (CPU and the compute device), autocast, the choice of attention
kernels, training flags and buffers. Does NOT restore Python's or numpy's random numbers, or
attributes that a module sets on itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel


class ForwardState:
    """The state that a block's forward depends on.

    The caller must create an instance just before the forward, and call `forward_ended` just after.
    `last` holds the latest copies of the block's buffers, which are shared by instances while the
    values stay the same.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        last: dict[tuple[int, str], torch.Tensor],
    ) -> None:
        self.modules, self.device = modules, device
        self.training = [m.training for m in modules]
        self.cpu_rng = torch.get_rng_state()
        self.cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kinds = dict.fromkeys(("cpu", device.type))
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        self.autocast = [(kind, enabled(kind), dtype(kind)) for kind in kinds]
        self.attention = _cur_sdpa_kernel_backends() if device.type == "cuda" else []
        self.before: dict[tuple[int, str], torch.Tensor | None] = {}
        for i, module in enumerate(modules):
            for key, buffer in module._buffers.items():
                self.before[i, key] = None if buffer is None else _copy(buffer, last, (i, key))
        self.changed: set[tuple[int, str]] = set()  # buffers that were changed by the forward

    def forward_ended(self) -> None:
        self.changed = {at for at, copy in self.before.items() if not _same(self._now(at), copy)}

    def _now(self, at: tuple[int, str]) -> torch.Tensor | None:
        return self.modules[at[0]]._buffers.get(at[1])

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Restore the state from before the forward, except autocast, while the context is
        active."""
        with ExitStack() as stack:
            devices = [] if self.cuda_rng is None else [self.device]
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self.cpu_rng)
            if self.cuda_rng is not None:
                torch.cuda.set_rng_state(self.cuda_rng, self.device)
            for module, then in zip(self.modules, self.training):
                if module.training != then:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = then
            self._replay_buffers(stack)
            if self.attention and self.attention != _cur_sdpa_kernel_backends():
                stack.enter_context(sdpa_kernel(self.attention))
            yield

    @contextmanager
    def replay_autocast(self) -> Iterator[None]:
        """Restore the autocast of the forward while the context is active, which must contain only
        the recomputation, not the computation of gradients."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield

    def _replay_buffers(self, stack: ExitStack) -> None:
        for at, copy in self.before.items():
            now = self._now(at)
            if at in self.changed or not _same(now, copy):
                buffers = self.modules[at[0]]._buffers
                stack.callback(buffers.__setitem__, at[1], now)
                buffers[at[1]] = None if copy is None else copy.clone()


@contextmanager
def keeping_nothing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disable autocast's cache and gradient checkpointing in `modules` while the context is active.
    Autocast's cache would be wrong, because the same Parameter has different values later."""
    was = torch.is_autocast_cache_enabled()
    on = [m for m in modules if m.__dict__.get("gradient_checkpointing") is True]
    torch.set_autocast_cache_enabled(False)
    for module in on:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
        for module in on:
            module.__dict__["gradient_checkpointing"] = True


def _copy(
    buffer: torch.Tensor, last: dict[tuple[int, str], torch.Tensor], at: tuple[int, str]
) -> torch.Tensor:
    saved = last.get(at)
    if saved is None or not _same(buffer, saved):
        saved = last[at] = buffer.detach().clone()
    return saved


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
