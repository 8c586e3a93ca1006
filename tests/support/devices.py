"""The devices of tests of whole steps: DEVICES, and what makes each of them ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.cuda import _sanitizer
from torch.nn.attention import SDPBackend, sdpa_kernel

from roadtrain.device.accelerator import accelerators
from roadtrain.lab.emulated_device import EmulatedDevice
from tests.support import toy_device

# whether it has streams, and events
TOYS = {"toy": (True, True), "toy, one stream": (False, True), "toy, no events": (True, False)}
SEPARATE = [*(TOYS if hasattr(torch, "toy") else ()), *["cuda"] * torch.cuda.is_available()]
DEVICES = ["emulated", *SEPARATE]
# The clocks of the emulated device spend most of their time on stacks, which it does not show.
NO_STACKS = SimpleNamespace(
    walk_stack=id, StackSummary=SimpleNamespace(extract=lambda *_, **__: [])
)
if torch.cuda.is_available():
    torch.zeros(
        1, device="cuda"
    )  # the driver's descriptors are open before tests look for new ones


@contextmanager
def active(device: str) -> Iterator[str]:
    """Make a device of DEVICES or the CPU ready, and return its kind in torch: "cpu" for the emulated
    device, which must report no race until the end."""
    with sdpa_kernel(SDPBackend.MATH):  # each device has other kernels of its own
        if device == "emulated":
            stackless = patch.object(_sanitizer, "traceback", NO_STACKS)
            with stackless, EmulatedDevice().active() as emulated:
                yield "cpu"
            assert emulated.races == [] and emulated.held == 0
            return
        if device in TOYS:
            toy_device.load()
            torch.ops.toy.has(*TOYS[device])
            accelerators.clear()
        yield device.partition(",")[0]
