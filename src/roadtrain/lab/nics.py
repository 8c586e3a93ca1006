"""NICs and links of a lab: rates, cuts, loss, MTUs and traffic counters. network.py makes them.

Note "loss". At the receiving end of a direction, tc's clsact applies a filter of four instructions
of classic BPF, which draws 32 random bits for each packet and drops it if they are below the share.
To the filter, a train of segments that the sender leaves to the hardware is one packet, so lossy
ends send such trains as single packets.
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
CARD_MOST = 0.5e9  # bytes per second that CPUs can forward while computing
# linux/filter.h: load a random word; where it is at least the bound pass (0), else drop (2)
LOSING = "4,32 0 0 4294963256,53 0 1 {bound},6 0 0 0,6 0 0 2"


def limit_of(bytes_per_s: float) -> str:
    """Return tc's words that limit what leaves a device; tc's unit bps is bytes.

    After an idle time, the bytes of 20 ms pass at once, within both limits of a burst: a smaller
    burst than a train of segments (64 kB and headers) would split it, which costs much CPU. As many
    bytes plus 256 kB may be queued, whatever the burst, which TCP connections that share the link
    need.
    """
    in_time = int(bytes_per_s * BURST_S)
    burst = min(max(in_time, LEAST_BURST), MOST_BURST)
    return f"root tbf burst {burst} limit {in_time + MOST_BURST} rate {int(bytes_per_s)}bps"


def losing(share: float) -> str:
    """Return tc's bytecode of a filter that drops this share of packets. Raises ConfigError."""
    if not 0 <= share < 1:
        raise ConfigError(f"a loss of {share} is not a share of packets: 0 <= share < 1")
    return LOSING.format(bound=round(share * (1 << RANDOM_BITS)))


@dataclass(frozen=True)
class LabNic:
    """A NIC of a host, with the rate of outgoing and, by default, incoming data."""

    bytes_per_s: float
    switch: str = "switch"
    in_bytes_per_s: float | None = None
    loss: float = 0.0
    """Share of packets lost at random, in each direction independently."""

    def __post_init__(self) -> None:
        losing(self.loss)


@dataclass(frozen=True)
class End:
    """An end of a link: a device in a namespace (given by its file)."""

    net: Path
    device: str

    def do(self, tool: str, words: str, *more: str) -> str:
        """Run a tool in the namespace. `more` are words that contain blanks."""
        return command("nsenter", f"--net={self.net}", tool, *words.split(), *more)


def _send_cut_up(end: End, split: bool) -> None:
    """Set whether large pieces are split before they leave, instead of by hardware."""
    end.do("ip", f"link set {end.device} gso_max_segs {1 if split else 65535}")


@dataclass(frozen=True)
class Traffic:
    """Bytes since the NIC was made; see `LabLink.traffic` and `LabLink.frames`."""

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True)
class LabLink:
    """A NIC and its port, or two ports of different switches. `address` is "" between switches."""

    near: End
    far: End
    address: str = ""

    def set_rate(self, bytes_per_s: float, in_bytes_per_s: float | None = None) -> None:
        """Set the rate of what leaves the near end (the host, or the first switch), and of what
        arrives there."""
        for end, rate in ((self.near, bytes_per_s), (self.far, in_bytes_per_s or bytes_per_s)):
            end.do("tc", f"qdisc replace dev {end.device} {limit_of(rate)}")

    def set_mtu(self, mtu: int, carried: int | None = None) -> None:
        """Set the MTU of the host's NIC; its port of the switch carries frames up to `carried`
        bytes (by default the same). Larger ones are silently dropped, as in a switch.

        Raises ConfigError for an MTU that the lab's NICs do not support.
        """
        for end, nbytes in ((self.near, mtu), (self.far, carried or mtu)):
            if not MIN_MTU <= nbytes <= MAX_MTU:
                raise ConfigError(f"an MTU of {nbytes} bytes, must be {MIN_MTU} to {MAX_MTU}")
            end.do("ip", f"link set {end.device} mtu {nbytes}")
        # a large piece that hardware would split is not checked against the MTU of the port
        if not self._loses(self.near):
            _send_cut_up(self.near, carried is not None)

    def set_loss(self, share: float) -> None:
        """Lose each packet with this probability, independently in each direction. After the first
        call, even with 0, packets are sent one by one, which costs CPU time.

        Raises ConfigError if it is not a share below 1.
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
        """Return the bytes of whole Ethernet frames, as the rate counts them, that have left the
        near end and the far end, including those lost afterwards."""
        sent, received = (
            json.loads(end.do("tc", f"-s -j qdisc show dev {end.device} root"))[0]["bytes"]
            for end in (self.near, self.far)
        )
        return Traffic(sent, received)

    def traffic(self) -> Traffic:
        """Return the bytes of TCP payload that have left the near end and arrived there.

        The kernel counts bytes and packets; 66 bytes per packet are headers (14 + 20 + 32). Packets
        that are not segments with time stamps (ARP, the first packets of a connection, selective
        acknowledgements) cause an error of some bytes each. Retransmissions are included.
        """
        (shown,) = json.loads(self.near.do("ip", f"-s -j link show dev {self.near.device}"))
        sent, received = (
            way["bytes"] - HEADERS * way["packets"]
            for way in (shown["stats64"]["tx"], shown["stats64"]["rx"])
        )
        return Traffic(sent, received)

    def down(self) -> None:
        """Cut the link: packets are lost in both directions, and the host sees no carrier.
        Connections stall, but do not break."""
        self.far.do("ip", f"link set {self.far.device} down")

    def up(self) -> None:
        self.far.do("ip", f"link set {self.far.device} up")
