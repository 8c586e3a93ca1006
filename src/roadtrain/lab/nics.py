"""The NICs and links of a lab: rates, cuts, MTUs and what crossed them. Does NOT make them
(network.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.lab.made import command

# a burst below 64 kB splits segments, which burns a core
TBF = "root tbf burst 256kb latency 20ms rate"
ETHERNET, IP, TCP = 14, 20, 32  # bytes of the headers of one frame, TCP's with its time stamps
HEADERS = ETHERNET + IP + TCP
MTU = 1500
MIN_MTU, MAX_MTU = 68, 65535  # what the kernel's veth takes


@dataclass(frozen=True)
class LabNic:
    """What a host has: `bytes_per_s` leave it and, unless said otherwise, arrive."""

    bytes_per_s: float
    switch: str = "switch"
    in_bytes_per_s: float | None = None


@dataclass(frozen=True)
class End:
    """One end of a link: a device in a namespace (its file)."""

    net: Path
    device: str

    def do(self, tool: str, words: str) -> str:
        """What the command says."""
        return command("nsenter", f"--net={self.net}", tool, *words.split())


@dataclass(frozen=True)
class Traffic:
    """Bytes of TCP payload since the NIC was made.

    The kernel counts bytes and packets; 66 bytes a packet are headers (14 + 20 + 32). What is not a
    segment with time stamps (ARP, the first packets of a connection, selective acknowledgements)
    makes an error of some bytes each. What was sent again counts again.
    """

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True)
class LabLink:
    """A NIC and its port, or two ports of different switches. `address` is empty between
    switches."""

    near: End
    far: End
    address: str = ""

    def set_rate(self, bytes_per_s: float, in_bytes_per_s: float | None = None) -> None:
        """From now on: what leaves the near end (the host, the switch named first), and what
        arrives there."""
        for end, rate in ((self.near, bytes_per_s), (self.far, in_bytes_per_s or bytes_per_s)):
            # tc's bps are bytes
            end.do("tc", f"qdisc replace dev {end.device} {TBF} {int(rate)}bps")

    def set_mtu(self, mtu: int, carried: int | None = None) -> None:
        """From now on the host's NIC has this MTU; its port of the switch carries frames up to
        `carried` (as many, unless said otherwise). Larger ones are lost without a word, as in a
        switch.

        Raises ConfigError for an MTU that no NIC of the lab can have.
        """
        for end, nbytes in ((self.near, mtu), (self.far, carried or mtu)):
            if not MIN_MTU <= nbytes <= MAX_MTU:
                raise ConfigError(f"an MTU of {nbytes} bytes, it is {MIN_MTU} to {MAX_MTU}")
            end.do("ip", f"link set {end.device} mtu {nbytes}")
        # what leaves as one large piece, to be split by hardware, no port would find too large
        self.near.do("ip", f"link set {self.near.device} gso_max_segs {1 if carried else 65535}")

    def traffic(self) -> Traffic:
        """What has left the near end, and what has arrived there."""
        (shown,) = json.loads(self.near.do("ip", f"-s -j link show dev {self.near.device}"))
        sent, received = (
            way["bytes"] - HEADERS * way["packets"]
            for way in (shown["stats64"]["tx"], shown["stats64"]["rx"])
        )
        return Traffic(sent, received)

    def down(self) -> None:
        """A cut: what is sent is lost, both ways, and the host sees no carrier. Connections
        wait, they do not break."""
        self.far.do("ip", f"link set {self.far.device} down")

    def up(self) -> None:
        self.far.do("ip", f"link set {self.far.device} up")
