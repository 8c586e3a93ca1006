"""What a block's forward depends on beside its arguments and parameters, taken before it and replayed for backward.

RNG state (CPU and the compute device), autocast, the choice of attention kernels, training flags of its modules, and
its buffers: the recomputation sees them as they were before the forward and leaves them as it found them, so that a
batch norm counts every batch once.

Assumes: what else a block reads does not change between its forward and its backward.
Does NOT replay Python's or numpy's random numbers, or attributes that a module sets on itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from roadtrain.errors import LoopError


class Circumstances:
    """Made just before a forward; `forward_ended` just after it."""

    def __init__(self, name: str, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.name, self.modules, self.device = name, modules, device
        self.training = [m.training for m in modules]
        self.cpu_rng = torch.get_rng_state()
        self.cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kinds = dict.fromkeys(("cpu", device.type))
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.attention = _attention_kernels() if device.type == "cuda" else []
        self.before: dict[tuple[int, str], tuple[torch.Tensor | None, torch.Tensor | None, int]] = {}
        for i, module in enumerate(modules):
            for key, buffer in module._buffers.items():
                copy = None if buffer is None else buffer.detach().clone()
                self.before[i, key] = (buffer, copy, -1 if buffer is None else _version(buffer))
        self.changed: dict[tuple[int, str], torch.Tensor | None] = {}  # what the forward changed -> value before it

    def forward_ended(self) -> None:
        """Keep copies only of the buffers that the forward changed."""
        for (i, key), (buffer, copy, version) in self.before.items():
            now = self.modules[i]._buffers.get(key)
            if now is not buffer or (now is not None and _version(now) != version):
                self.changed[i, key] = copy
        self.before = {at: (b, None, v) for at, (b, _, v) in self.before.items() if at not in self.changed}

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Everything but autocast as it was before the forward; afterwards everything as it is now."""
        with ExitStack() as stack:
            self._replay_rng(stack)
            self._replay_training(stack)
            self._replay_buffers(stack)
            if self.attention and self.attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(self.attention))
            yield

    @contextmanager
    def replay_autocast(self) -> Iterator[None]:
        """The forward's autocast, for the recomputation only: the gradient's own arithmetic runs outside of it."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    def _replay_rng(self, stack: ExitStack) -> None:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        torch.set_rng_state(self.cpu_rng)
        if self.cuda_rng is not None:
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.device), self.device)
            torch.cuda.set_rng_state(self.cuda_rng, self.device)

    def _replay_training(self, stack: ExitStack) -> None:
        for module, then in zip(self.modules, self.training):
            if module.training != then:
                stack.callback(setattr, module, "training", module.training)
                module.training = then

    def _replay_buffers(self, stack: ExitStack) -> None:
        for (i, key), (buffer, _, version) in self.before.items():
            now = self.modules[i]._buffers.get(key)
            if now is not buffer or (now is not None and _version(now) != version):
                raise LoopError(f"buffer {key!r} of block {self.name!r} changed between its forward and its backward",
                                hint="run backward before the next forward, or change the buffer after step()")
        for (i, key), value in self.changed.items():
            buffers = self.modules[i]._buffers
            stack.callback(buffers.__setitem__, key, buffers.get(key))
            buffers[key] = None if value is None else value.clone()


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Autocast keeps casts of parameters by their identity, and here the same Parameter holds other values later."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextmanager
def no_own_checkpointing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The block is recomputed as a whole: a transformers layer that also checkpoints itself would do it twice."""
    on = [m for m in modules if m.__dict__.get("gradient_checkpointing") is True]
    for module in on:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module in on:
            module.__dict__["gradient_checkpointing"] = True


def _attention_kernels() -> list[SDPBackend]:
    backends: Any = torch.backends.cuda
    flags = (
        (backends.flash_sdp_enabled(), SDPBackend.FLASH_ATTENTION),
        (backends.mem_efficient_sdp_enabled(), SDPBackend.EFFICIENT_ATTENTION),
        (backends.cudnn_sdp_enabled(), SDPBackend.CUDNN_ATTENTION),
        (backends.math_sdp_enabled(), SDPBackend.MATH),
    )
    return [kind for on, kind in flags if on]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
