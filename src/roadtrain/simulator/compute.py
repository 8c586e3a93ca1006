"""How long a device computes: from a measured table, else a curve of efficiency by size, else one
efficiency.

A block's forward of F FLOPs takes (F + half) / (peak x efficiency) seconds (n half where n experts
are side by side), no less than its bytes take to cross the device's memory, and no less than it
takes to launch. `Constants` are at most six figures a kind of hardware; spec/fitted.toml holds
those that were fitted, with where they come from.
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

# seconds that a block takes at least where nobody measured it: two kernels of about 5 us each
LAUNCH_S = 1e-5


@dataclass(frozen=True)
class HostTimes:
    """Of one kind of host: `table` and `touch` as in Constants; 0.0: as there."""

    table: Mapping[tuple[str, int], float]
    touch: float = 0.0


@dataclass(frozen=True)
class Constants:
    """`efficiency`: of the device's peak, where a block is large; `half`: FLOPs of a block at
    which half of it is reached; `attention`: efficiency of its FLOPs, over that of others;
    `launch`: seconds that a block takes at least, as its kernels are launched; `network`: the
    share of a card's rate that data has; `tax`: the share of the network's time in which devices
    that communicate do not compute; `fixed`: seconds a step besides; `traffic`: how often what
    backward needs of a block crosses the device's memory in a forward, besides."""

    efficiency: float = 0.5
    half: float = 0.0
    launch: float = 0.0
    attention: float = 1.0
    network: float = 0.9
    tax: float = 0.0
    fixed: float = 0.0
    traffic: float = 0.0
    source: str = "assumed"
    # seconds of a host's processors that a byte takes to leave or to enter it, where they compute
    touch: float = 0.0
    # seconds of a backward over those of a forward
    backward: float = 2.0
    # (kind of block, samples) -> measured seconds of its forward on one device
    table: Mapping[tuple[str, int], float] = field(default_factory=dict)
    # name of a host -> what was measured on it
    hosts: Mapping[str, HostTimes] = field(default_factory=dict)

    def of_host(self, name: str) -> Constants:
        """As they are on the hosts of that name."""
        own = self.hosts.get(name)
        if own is None:
            return self
        return replace(self, table={**self.table, **own.table}, touch=own.touch or self.touch)

    def forward_of(self, block: BlockShape, plan: Plan, device: Device) -> float:
        """Seconds of a block's forward on one of a plan's devices. A layer's products have the
        plan's precision; attention, and what is no layer, is computed in 16 bits."""
        samples, framework = plan.micro_batch, plan.framework
        ranks = plan.parallelism.tp * plan.parallelism.cp
        if (known := self._measured(block.name.partition(".")[0], samples)) is not None:
            return known / ranks
        slower = device.flops / device.peak(framework.precision) if "." in block.name else 1.0
        products = (block.flops - block.attention) * slower
        flops = (products + block.attention / self.attention) * samples / ranks
        moved = 0.0
        if self.traffic:
            moved = framework.passes * self.traffic * block.saved * samples / ranks
            moved /= device.memory_rate
        small = self.half * (flops > 0) * max(1.0, block.matrices / plan.parallelism.ep)
        computing = (flops + small) / (device.flops * self.efficiency) + moved
        if not (block.flops or block.tables):  # an embedding that every device has: next to nothing
            return max(computing, self.launch)
        # processors' memory is the host's, whose rate the simulator shares out
        own = float("inf") if device.is_host else device.memory_rate
        crossing = forward_bytes(block, samples, ranks) / own
        return max(computing, crossing, self.launch, LAUNCH_S)

    def _measured(self, kind: str, samples: float) -> float | None:
        """Seconds of a block of that kind on one device; of another number of samples than were
        measured, in proportion to the nearest."""
        sizes = [size for name, size in self.table if name == kind]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: (abs(size - samples), size))
        return self.table[kind, nearest] * samples / nearest

    def scores(self, block: BlockShape, samples: float, ranks: int, device: Device) -> float:
        """Seconds of its attention alone, in which keys and values may come."""
        return block.attention * samples / ranks / (self.attention * self.efficiency * device.flops)

    @property
    def from_what(self) -> str:
        """Which of the three sources is used, for people."""
        if self.table or self.hosts:
            return "a measured table"
        return "a curve by size" if self.half or self.launch else "one efficiency"


def forward_bytes(block: BlockShape, samples: float, ranks: int) -> float:
    """Bytes that cross a device's memory in a block's forward, at least: rows that are looked up,
    the block's input, what backward needs of it, and each weight that is multiplied (2 bytes;
    those of experts are left out, as only some of them may be used)."""
    weights = min(block.params - block.tables - block.experts, block.flops * samples / 2)
    activations = (block.touched + block.input + block.saved) * samples
    return (2 * max(0.0, weights) + activations) / ranks


def constants(name: str) -> Constants:
    """Those of spec/fitted.toml. Raises ConfigError."""
    known = _known()
    if name not in known:
        raise ConfigError(f"no constants are called {name!r}", hint=f"known are {', '.join(known)}")
    return known[name]


@cache
def _known() -> dict[str, Constants]:
    tree = tomllib.loads(files("roadtrain.config").joinpath("fitted.toml").read_text())
    names = {f.name for f in fields(Constants)}
    return {
        name: Constants(**{k: v for k, v in values.items() if k in names})
        for name, values in tree.items()
    }
