"""Changes of the device's code that cause a race on a real device, and how the emulated device
finds each.

Each change removes or moves one wait. A small model is trained with the change, and the change is
found if the emulated device reports a race, if the losses differ from those of the CPU, or if
training raises an error.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roadtrain
from roadtrain.device.accelerator import AfterCopies, HostBuffer
from roadtrain.errors import RoadtrainError
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.servers.worker import Worker
from roadtrain.servers.worker_buffers import DeviceBuffers
from roadtrain.streaming.activations import Activations
from roadtrain.streaming.block_stream import BlockStream
from roadtrain.streaming.device_inputs import DeviceInputs

WIDTH, HIDDEN, LAYERS, STEPS = 256, 64, 8, 2
LATE_S = 0.003
BATCH = 4096  # inputs of blocks have 4 MiB, or 12 MiB if some are on files


@dataclass(frozen=True)
class Change:
    """A race: text `old` in the source of method `name` of `owner` becomes `new`."""

    what: str
    owner: type
    name: str
    old: str
    new: str
    late_s: float = LATE_S  # how late copies are for which the change matters

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the change while the context is active."""
        original = inspect.getattr_static(self.owner, self.name)
        function = inspect.unwrap(getattr(original, "fget", original))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.what}: {self.old!r} is not there once"
        scope: dict[str, Any] = {}
        code = compile(
            f"from __future__ import annotations\n{source.replace(self.old, self.new)}",
            function.__code__.co_filename,
            "exec",
        )
        exec(code, function.__globals__ | {"__name__": __name__}, scope)
        setattr(self.owner, self.name, scope[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, original)


CHANGES: Sequence[Change] = (
    Change(
        "kernels do not wait for the parameters",
        Worker,
        "fetch",
        "device.slots[slot].ready()",
        "device.slots[slot].tensor",
    ),
    Change(
        "a slot is reused while kernels read it",
        Worker,
        "release",
        "device.slots[self.machine.slot_in_use(block)].record_use()",
        "pass",
    ),
    Change(
        "a slot is released before the block runs",
        BlockStream,
        "fetched_block",
        "    block.depth += 1\n",
        "    self.source.release(block.index)\n    self.source.fetch(block.index)\n"
        "    block.depth += 1\n",
    ),
    Change(
        "the next gradient is written while the last one is copied",
        Worker,
        "lay_out",
        "write(buffer.ready())",
        "write(buffer.tensor)",
        late_s=0.3,
    ),
    Change(
        "a gradient is copied before it is computed",
        HostBuffer,
        "copy_from",
        "    source.record_use()\n",
        "",
    ),
    Change(
        "a gradient's copy leaves no event",
        HostBuffer,
        "copy_from",
        "source._copied.record(stream)",
        "pass",
        late_s=0.3,
    ),
    Change(
        "parameters are copied to a slot without an event",
        HostBuffer,
        "copy_to",
        "target._copied.record(stream)",
        "pass",
    ),
    Change(
        "a copy does not wait for the work before it",
        HostBuffer,
        "copies_on",
        "stream.wait_event(after)",
        "pass",
    ),
    Change(
        "a copy is not recorded",
        HostBuffer,
        "copies_on",
        "self.copied.record(stream)",
        "pass",
    ),
    Change(
        "a copy is recorded on the compute stream",
        HostBuffer,
        "copies_on",
        "self.copied.record(stream)",
        "self.copied.record(self._accelerator.current())",
    ),
    Change(
        "a copy runs on the compute stream's order only",
        HostBuffer,
        "copies_on",
        "self._accelerator.on(stream)",
        "self._accelerator.on(self._accelerator.new_stream())",
    ),
    Change(
        "parameters arrive in memory that is still copied",
        Worker,
        "_start_pulls",
        "(copying := host.copying()) is None",
        "(copying := None) is None",
    ),
    Change(
        "a gradient leaves before its copy has ended",
        Worker,
        "push_block",
        'self._after["push"].put(host.copying(), push)',
        'self._after["push"].put(None, push)',
    ),
    Change(
        "nothing waits for an event before a gradient leaves",
        AfterCopies,
        "_run",
        "event.synchronize()",
        "pass",
    ),
    Change(
        "an update begins before its gradient has left",
        Worker,
        "_carry_out",
        'self._after["push"].put(None, partial(self._send_all, [action]))',
        "self._send_all([action])",
    ),
    Change(
        "the root's gradient is freed while it is copied",
        Worker,
        "lay_out",
        "accelerator.current().wait_event(host.copied)",
        "pass",
    ),
    Change(
        "kernels do not wait for the root's parameters",
        Worker,
        "refresh_root",
        "device.root.ready()",
        "pass",
    ),
    Change(
        "the two gradient buffers are one",
        DeviceBuffers,
        "next_gradient",
        "next(self._turn)",
        "self.slots[0]",
    ),
    Change(
        "host memory is unpinned while it is copied",
        HostBuffer,
        "wait",
        "self.copied.synchronize()",
        "pass",
        late_s=0.3,
    ),
    Change(
        "a block input is freed while it is copied to the host",
        DeviceInputs,
        "leaving",
        "(copying := kept.host.copying()) is None",
        "(copying := None) is None",
        late_s=0.3,
    ),
    Change(
        "a block input is used before it is back",
        DeviceInputs,
        "take",
        "self.accelerator.current().wait_event(kept.host.copied)",
        "pass",
    ),
    Change(
        "a block input comes back into memory that kernels still use",
        DeviceInputs,
        "copy_in",
        "copies_on(self.accelerator.into)",
        "copies_on(self.accelerator.into, kept.host.copied)",
    ),
    Change(
        "a block input is copied to the host before it is computed",
        DeviceInputs,
        "copy_out",
        "copies_on(self.accelerator.out)",
        "copies_on(self.accelerator.out, kept.host.copied)",
    ),
    Change(
        "a block input is freed while it comes back",
        DeviceInputs,
        "drop_tensor",
        "kept.stream.wait_event(kept.host.copied)",
        "pass",
        late_s=0.3,
    ),
    Change(
        "a block input is written to the file before it is on the host",
        Activations,
        "_write",
        "ticket.at_device.wait()",
        "pass",
    ),
)


class Stopped(Exception):
    """Raised in the middle of a backward."""


class Model(nn.Module):
    """A model whose root block is used by the first and the last kernel of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(LAYERS)
        )
        self.stops_at = -1  # the layer at whose output backward stops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.stops_at:
                x.register_hook(_stop)
        return self.norm(x)


def _stop(grad: torch.Tensor) -> None:
    raise Stopped


def train(
    device: EmulatedDevice | None, kind: str = "cpu", /, *, on_files: bool, at_step: bool
) -> list[float]:
    """Train a small model on a device until a backward is stopped. Returns the losses.

    Args:
        device: The emulated device, if the model computes on one.
        kind: The kind of torch's device, which is "cpu" for an emulated one.
        on_files: Whether the state and some block inputs are on files, instead of in memory.
            Gradients are then clipped, if updates begin in step().
        at_step: Whether updates begin in step(), instead of in backward.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"host_budget": "96MiB"}
    if device is not None or kind != "cpu":
        options["device_budget"] = "18MiB"
    batch, losses = BATCH * (3 if on_files else 1), []
    with tempfile.TemporaryDirectory() as directory, device.active() if device else nullcontext():
        if on_files:
            options |= {"host_budget": "60MiB", "store": directory}
        placed = roadtrain.place(
            model,
            optimizer,
            device=kind,
            backwards_per_step=None if at_step else 1,
            report=lambda _: None,
            deadline_s=5,
            chunk_elements=1 << 16,
            **options,
        )
        with placed:
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(batch, WIDTH, generator=generator).to(kind)
                loss = model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                if at_step and on_files:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                placed.step()
                placed.zero_grad()
                losses.append(float(loss.detach()))
            # while block inputs come back; an update that has begun allows no further backward
            for model.stops_at in (5, 4, 3) if at_step else (4,):
                with suppress(Stopped):
                    model(x).square().mean().backward()
                placed.zero_grad()
    return losses


CASES: Sequence[dict[str, bool]] = (
    {"on_files": False, "at_step": False},
    {"on_files": True, "at_step": True},
    {"on_files": False, "at_step": True},
)


def found_by(change: Change, expected: Callable[..., list[float]], seeds: int = 3) -> str:
    """Train with `change`, and return what found it: a race of the emulated device, an error, or
    "different losses". Returns "" if nothing did. `expected(**options)` are the losses of the
    CPU."""
    for seed, options in itertools.product(range(seeds), CASES):
        device, losses, raised = EmulatedDevice(seed=seed, late_s=change.late_s), None, ""
        with change.active():
            try:
                losses = train(device, **options)
            except (RoadtrainError, RuntimeError, AssertionError) as error:
                raised = f"{type(error).__name__}: {error}".splitlines()[0]
        if device.races or raised:
            return [*device.races, raised][0]
        if losses != expected(**options):
            return "different losses"
    return ""
