"""NICs and links of a lab: rates, cuts, loss, MTUs and traffic counters. network.py makes them.

Note "loss". A BPF filter at the receiver drops each packet with the set probability. A NIC may
split a large block of data into packets, and the filter would count the block as one packet. So on
links with loss, the sender's kernel splits the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.lab.resource import command

BURST_S, LEAST_BURST, MOST_BURST = 0.02, 80_000, 262_144
ETHERNET, IP, TCP = 14, 20, 32  # header bytes of a frame; TCP's include time stamps
HEADERS = ETHERNET + IP + TCP
MTU = 1500
MIN_MTU, MAX_MTU = 68, 65535  # limits of the kernel's veth
FILTER = "ingress pref 1 handle 1 bpf direct-action bytecode"
RANDOM_BITS = 32
CARD_MOST = 0.5e9  # bytes per second that CPUs can forward while they compute
# linux/filter.h: load a random word; if it is at least `bound`, pass the packet (0), else drop (2)
LOSING = "4,32 0 0 4294963256,53 0 1 {bound},6 0 0 0,6 0 0 2"


def limit_of(bytes_per_s: float) -> str:
    """Return arguments for the command `tc` that limit the rate at which data leaves a network
    device.

    After an idle time, the device may send the bytes of 20 ms at once, but at least 80 kB and at
    most 256 KiB: a smaller burst would force the kernel to split its blocks of 64 kB, which costs
    much CPU time. The queue holds the bytes of 20 ms plus 256 KiB; a shorter queue would slow down
    TCP connections that share the link.
    """
    in_time = int(bytes_per_s * BURST_S)
    burst = min(max(in_time, LEAST_BURST), MOST_BURST)
    return f"root tbf burst {burst} limit {in_time + MOST_BURST} rate {int(bytes_per_s)}bps"


def losing(share: float) -> str:
    """Return `tc`'s arguments for a filter that drops the fraction `share` of all packets. Raises
    ConfigError if `share` is not in [0, 1)."""
    if not 0 <= share < 1:
        raise ConfigError(f"loss = {share}, but must be a fraction of at least 0 and below 1")
    return LOSING.format(bound=round(share * (1 << RANDOM_BITS)))


@dataclass(frozen=True)
class LabNic:
    """The description of a host's NIC. `bytes_per_s`: rate of outgoing data. `in_bytes_per_s`: rate
    of incoming data (default: the same)."""

    bytes_per_s: float
    switch: str = "switch"
    in_bytes_per_s: float | None = None
    loss: float = 0.0
    """Share of packets that are lost at random, independently in each direction."""

    def __post_init__(self) -> None:
        losing(self.loss)


@dataclass(frozen=True)
class End:
    """An end of a link: a network device in a namespace. `net`: the file of the namespace."""

    net: Path
    device: str

    def do(self, tool: str, words: str, *more: str) -> str:
        """Run a tool in the namespace and return its output. `words`: arguments, separated by
        blanks. `more`: further arguments, which may contain blanks."""
        return command("nsenter", f"--net={self.net}", tool, *words.split(), *more)


def _send_cut_up(end: End, split: bool) -> None:
    """Set whether the kernel splits large blocks of data into packets, or leaves this to the
    NIC."""
    end.do("ip", f"link set {end.device} gso_max_segs {1 if split else 65535}")


@dataclass(frozen=True)
class Traffic:
    """Bytes sent and received since a NIC was made."""

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True)
class LabLink:
    """A link between a NIC (`near`) and its port of a switch (`far`), or between ports of two
    switches. `address`: the address of the NIC, or "" between switches."""

    near: End
    far: End
    address: str = ""

    def set_rate(self, bytes_per_s: float, in_bytes_per_s: float | None = None) -> None:
        """Set the rates at which data leaves and reaches the near end (the host, or the first
        switch). By default, `in_bytes_per_s` is equal to `bytes_per_s`."""
        for end, rate in ((self.near, bytes_per_s), (self.far, in_bytes_per_s or bytes_per_s)):
            end.do("tc", f"qdisc replace dev {end.device} {limit_of(rate)}")

    def set_mtu(self, mtu: int, carried: int | None = None) -> None:
        """Set the MTU of the host's NIC to `mtu`, and that of its switch port to `carried`
        (default: `mtu`).

        The port silently drops larger packets, as a real switch does. Raises ConfigError for an MTU
        that the lab's NICs do not support.
        """
        for end, nbytes in ((self.near, mtu), (self.far, carried or mtu)):
            if not MIN_MTU <= nbytes <= MAX_MTU:
                raise ConfigError(f"an MTU must be {MIN_MTU} to {MAX_MTU} bytes, not {nbytes}")
            end.do("ip", f"link set {end.device} mtu {nbytes}")
        # a large piece that hardware would split is not checked against the MTU of the port
        if not self._loses(self.near):
            _send_cut_up(self.near, carried is not None)

    def set_loss(self, share: float) -> None:
        """Lose each packet with the probability `share`, independently in each direction.

        From the first call on, the kernel sends packets one by one, which costs CPU time. Raises
        ConfigError if `share` is not in [0, 1).
        """
        dropping = losing(share)
        for end in (self.near, self.far):
            if not self._loses(end):
                _send_cut_up(end, True)
                end.do("tc", f"qdisc add dev {end.device} clsact")
            end.do("tc", f"filter replace dev {end.device} {FILTER}", dropping)

    @staticmethod
    def _loses(end: End) -> bool:
        return "clsact" in end.do("tc", f"qdisc show dev {end.device}")

    def frames(self) -> Traffic:
        """Return the bytes of Ethernet frames, with headers, sent from the near end (`sent`) and
        from the far end (`received`). Frames that are lost later are included."""
        sent, received = (
            json.loads(end.do("tc", f"-s -j qdisc show dev {end.device} root"))[0]["bytes"]
            for end in (self.near, self.far)
        )
        return Traffic(sent, received)

    def traffic(self) -> Traffic:
        """Return the bytes of TCP payload sent from the near end and received there.

        The numbers are computed from the kernel's counters, with 66 bytes of headers per packet.
        Each packet without TCP time stamps (ARP, the first packets of a connection) causes an error
        of some bytes. Retransmissions are included.
        """
        (shown,) = json.loads(self.near.do("ip", f"-s -j link show dev {self.near.device}"))
        sent, received = (
            way["bytes"] - HEADERS * way["packets"]
            for way in (shown["stats64"]["tx"], shown["stats64"]["rx"])
        )
        return Traffic(sent, received)

    def down(self) -> None:
        """Cut the link: packets are lost in both directions, and the host sees no carrier. TCP
        connections stall, but do not break."""
        self.far.do("ip", f"link set {self.far.device} down")

    def up(self) -> None:
        self.far.do("ip", f"link set {self.far.device} up")
