"""Model how long a device computes. The times come from a table of measurements, from a curve
(efficiency as a function of a block's size), or from a constant efficiency.

A block's forward of F FLOPs takes (F + half) / (peak x efficiency) seconds. The constant `half` is
the number of FLOPs at which a block reaches half of the efficiency. If the device holds n experts
of the block, n x half replaces `half` in this formula. The forward takes at least as long as moving
its data through the device's memory, and at least as long as launching its kernels. The file
config/fitted.toml has fitted values and their sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files

from roadtrain.config.cluster import Device
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Plan
from roadtrain.errors import ConfigError

# the least seconds of a block that was not measured: two kernels of about 5 us each
LAUNCH_S = 1e-5


@dataclass(frozen=True)
class HostTimes:
    """Measurements on one kind of host. `table`: (kind of block, number of samples) -> the measured
    seconds of the block's forward on one device. `touch`: CPU seconds per byte that enters or
    leaves the host; 0.0 if not measured."""

    table: Mapping[tuple[str, int], float]
    touch: float = 0.0


@dataclass(frozen=True)
class Constants:
    """Figures of a kind of hardware.

    Attributes:
        efficiency: The fraction of the device's peak FLOP/s that large blocks reach.
        half: The FLOPs of a block that reaches half of this efficiency.
        launch: The seconds that launching a block's kernels takes. No block takes less time.
        attention: The efficiency of attention divided by the efficiency of other FLOPs.
        network: The fraction of a network card's rate that is available to data.
        tax: The fraction of a transfer's time in which the devices cannot compute because they work
            on the transfer.
        fixed: Additional seconds per step.
        traffic: The bytes that a forward moves through device memory for each byte that the forward
            saves for backward. The time for moving these bytes is added to the time of computing.
        source: A text that names the source of the figures.
        touch: CPU seconds per byte that enters or leaves a host, if the host's CPUs run the model.
        backward: The seconds of a backward divided by the seconds of a forward.
        table: (kind of block, number of samples) -> the measured seconds of the block's forward on
            one device.
        hosts: Name of a host -> the measurements on this host.
    """

    efficiency: float = 0.5
    half: float = 0.0
    launch: float = 0.0
    attention: float = 1.0
    network: float = 0.9
    tax: float = 0.0
    fixed: float = 0.0
    traffic: float = 0.0
    source: str = "assumed"
    touch: float = 0.0
    backward: float = 2.0
    table: Mapping[tuple[str, int], float] = field(default_factory=dict)
    hosts: Mapping[str, HostTimes] = field(default_factory=dict)

    def of_host(self, name: str) -> Constants:
        """Return a copy of these constants with the measurements on hosts of this name, if there
        are any."""
        own = self.hosts.get(name)
        if own is None:
            return self
        return replace(self, table={**self.table, **own.table}, touch=own.touch or self.touch)

    def forward_of(self, block: BlockShape, plan: Plan, device: Device) -> float:
        """Return the seconds of a block's forward on one of a plan's devices."""
        samples, framework = plan.micro_batch, plan.framework
        ranks = plan.parallelism.tp * plan.parallelism.cp
        if (measured := self._measured(block.name.partition(".")[0], samples)) is not None:
            return measured / ranks
        slower = device.flops / device.peak(framework.precision) if "." in block.name else 1.0
        products = (block.flops - block.attention) * slower
        flops = (products + block.attention / self.attention) * samples / ranks
        moved = 0.0
        if self.traffic:
            moved = framework.passes * self.traffic * block.saved * samples / ranks
            moved /= device.memory_rate
        small = self.half * (flops > 0) * max(1.0, block.matrices / plan.parallelism.ep)
        computing = (flops + small) / (device.flops * self.efficiency) + moved
        # an embedding that every device holds costs next to nothing
        if not (block.flops or block.tables):
            return max(computing, self.launch)
        # CPUs use the host's memory, whose rate the simulator divides among all tasks that use it
        own = float("inf") if device.is_host else device.memory_rate
        crossing = forward_bytes(block, samples, ranks) / own
        return max(computing, crossing, self.launch, LAUNCH_S)

    def _measured(self, kind: str, samples: float) -> float | None:
        """Return the measured seconds of this kind of block's forward for `samples` samples, scaled
        from the nearest number of samples. Return None if this kind of block was not measured."""
        sizes = [size for name, size in self.table if name == kind]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: (abs(size - samples), size))
        return self.table[kind, nearest] * samples / nearest

    def scores(self, block: BlockShape, samples: float, ranks: int, device: Device) -> float:
        """Return the seconds in which a device computes only the attention of a block. Keys and
        values can be transferred during this time."""
        return block.attention * samples / ranks / (self.attention * self.efficiency * device.flops)

    @property
    def from_what(self) -> str:
        """A text for the user on the origin of the computing times, such as "a measured table"."""
        if self.table or self.hosts:
            return "a measured table"
        return "a curve by size" if self.half or self.launch else "one efficiency"


def forward_bytes(block: BlockShape, samples: float, ranks: int) -> float:
    """Return the least number of bytes that a block's forward moves through a device's memory. The
    weights of experts are not counted, because a forward may use only some of the experts."""
    weights = min(block.params - block.tables - block.experts, block.flops * samples / 2)
    activations = (block.touched + block.input + block.saved) * samples
    return (2 * max(0.0, weights) + activations) / ranks


def constants(name: str) -> Constants:
    """Return the constants of this name in config/fitted.toml. Raises ConfigError if the file has
    no constants of this name."""
    fitted = _fitted()
    if name not in fitted:
        raise ConfigError(f"no constants named {name!r}", hint=f"choose one of {', '.join(fitted)}")
    return fitted[name]


@cache
def _fitted() -> dict[str, Constants]:
    tree = tomllib.loads(files("roadtrain.config").joinpath("fitted.toml").read_text())
    names = {f.name for f in fields(Constants)}
    return {
        name: Constants(**{k: v for k, v in values.items() if k in names})
        for name, values in tree.items()
    }
