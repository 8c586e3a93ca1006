"""LabFile: what a lab is made of, as LAB.toml says it. Unknown keys and wrong types raise
ConfigError.

Rates and sizes are checked and stay as they were written, for people. Does NOT make anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from roadtrain.lab.cpus import MIN_CPUS
from roadtrain.lab.nics import LabNic
from roadtrain.options.schema import Count, RateText, Section, SizeText, checked, read_toml
from roadtrain.units import parse_rate


class NicSection(Section):
    rate: RateText = Field(description="each way")
    in_rate: RateText | None = Field(default=None, description="what arrives, where that differs")
    switch: str = Field(default="", description="default: the first switch")
    loss: float = Field(
        default=0.0, ge=0, lt=1, description="share of the packets that are lost, each way: 0.001"
    )


class StorageSection(Section):
    size: SizeText = Field(description="taken from the disk at once")
    read: RateText = Field(description="of direct I/O")
    write: RateText
    dir: str = Field(
        default="", description="where the image file goes; default: the temporary directory"
    )


class HostSection(Section):
    name: str
    count: Count | None = Field(
        default=None, le=1000, description="so many, called NAME0, NAME1, ..."
    )
    nics: list[NicSection] = Field(min_length=1)
    cpus: float | None = Field(
        default=None, ge=MIN_CPUS, description="CPUs that its processes may use, all together: 0.4"
    )
    storage: StorageSection | None = None

    @property
    def names(self) -> list[str]:
        return [self.name] if self.count is None else [f"{self.name}{n}" for n in range(self.count)]


class LinkSection(Section):
    between: tuple[str, str]
    rate: RateText = Field(description="each way")


class LabFile(Section):
    switches: list[str] = Field(default=["switch"], min_length=1)
    links: list[LinkSection] = []
    hosts: list[HostSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        named = [nic.switch for host in self.hosts for nic in host.nics if nic.switch]
        for switch in named + [switch for link in self.links for switch in link.between]:
            if switch not in self.switches:
                raise ValueError(f"no switch {switch!r}, only {', '.join(self.switches)}")
        names = [name for host in self.hosts for name in host.names]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"several hosts are called {', '.join(sorted(twice))}")
        return self

    def nics(self, host: HostSection) -> list[LabNic]:
        return [
            LabNic(
                parse_rate(nic.rate),
                nic.switch or self.switches[0],
                parse_rate(nic.in_rate or nic.rate),
                nic.loss,
            )
            for nic in host.nics
        ]

    def cpus(self) -> dict[str, float]:
        return {name: host.cpus for host in self.hosts if host.cpus for name in host.names}

    def link_rates(self) -> dict[tuple[str, str], float]:
        return {link.between: parse_rate(link.rate) for link in self.links}


def load_lab(path: str | Path) -> LabFile:
    """Raises ConfigError, which names the key and the nearest valid one."""
    return checked(LabFile, read_toml(path, "lab file"), str(path))
