"""ForwardState: all state on which a block's forward depends, except arguments and parameters. It
is recorded before the forward, and restored while the block is recomputed in backward.

The state consists of the RNG (CPU and the compute device), autocast, the choice of attention
kernels, training flags and buffers. Does NOT restore Python's or numpy's random numbers, or
attributes that a module sets on itself. On a device, does NOT notice in-place changes of a buffer
through `buffer.data`, because comparing values would wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel

from roadtrain.device.accelerator import random_state, set_random_state
from roadtrain.streaming.activations import version_of


class BufferCopy:
    """A copy of the values of `buffer`."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.version = buffer, _version(buffer)
        self.values = buffer.detach().clone()


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
        last: dict[tuple[int, str], BufferCopy],
    ) -> None:
        self.modules = modules
        self.training = [m.training for m in modules]
        self.rng = {at: random_state(at) for at in (torch.device("cpu"), device)}
        kinds = dict.fromkeys(("cpu", device.type))
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        self.autocast = [(kind, enabled(kind), dtype(kind)) for kind in kinds]
        self.attention = _cur_sdpa_kernel_backends()
        self.before: dict[tuple[int, str], BufferCopy | None] = {}
        for i, module in enumerate(modules):
            for key, buffer in module._buffers.items():
                self.before[i, key] = None if buffer is None else _copy(buffer, last, (i, key))
        self.changed: set[tuple[int, str]] = set()  # buffers that were changed by the forward

    def forward_ended(self) -> None:
        copies = self.before.items()
        self.changed = {at for at, copy in copies if not _is_unchanged(self._now(at), copy)}

    def _now(self, at: tuple[int, str]) -> torch.Tensor | None:
        return self.modules[at[0]]._buffers.get(at[1])

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Restore the state from before the forward, except autocast, while the context is
        active."""
        with ExitStack() as stack:
            for device, state in self.rng.items():
                stack.callback(set_random_state, random_state(device), device)
                set_random_state(state, device)
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
            if at in self.changed or not _is_unchanged(now, copy):
                buffers = self.modules[at[0]]._buffers
                stack.callback(buffers.__setitem__, at[1], now)
                buffers[at[1]] = None if copy is None else copy.values.clone()


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
    buffer: torch.Tensor, last: dict[tuple[int, str], BufferCopy], at: tuple[int, str]
) -> BufferCopy:
    saved = last.get(at)
    if saved is None or not _is_unchanged(buffer, saved):
        saved = last[at] = BufferCopy(buffer)
    return saved


def _is_unchanged(now: torch.Tensor | None, before: BufferCopy | None) -> bool:
    if now is None or before is None:
        return now is before
    if now.device.type != "cpu":
        return now is before.buffer and _version(now) == before.version
    values = before.values
    return now.dtype == values.dtype and now.device == values.device and torch.equal(now, values)


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    """Return two numbers, one of which changes if the values of `buffer` change."""
    return buffer.data_ptr(), version_of(buffer)
