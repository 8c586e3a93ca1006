"""The NICs and links of a lab: rates, cuts, loss, MTUs and what crossed them. Does NOT make them
(network.py).

Note: loss. At the end where packets of a direction arrive, tc's clsact asks a filter of four
instructions of classic BPF, which draws 32 random bits for each packet and drops it where they are
below the share. A train of segments that its sender left to the hardware is one packet to it, so
ends that lose send such trains cut up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roadtrain.errors import ConfigError
from roadtrain.lab.made import command

BURST_S, LEAST_BURST, MOST_BURST = 0.02, 80_000, 262_144
ETHERNET, IP, TCP = 14, 20, 32  # bytes of the headers of one frame, TCP's with its time stamps
HEADERS = ETHERNET + IP + TCP
MTU = 1500
MIN_MTU, MAX_MTU = 68, 65535  # what the kernel's veth takes
FILTER = "ingress pref 1 handle 1 bpf direct-action bytecode"
RANDOM_BITS = 32
CARD_MOST = 0.5e9  # bytes a second that processors which also compute still pass on
# linux/filter.h: load a random word; where it is at least the bound pass (0), else drop (2)
LOSING = "4,32 0 0 4294963256,53 0 1 {bound},6 0 0 0,6 0 0 2"


def limit_of(bytes_per_s: float) -> str:
    """Of what leaves a device, as tc's words; tc's bps are bytes.

    A link that was idle lets the bytes of 20 ms pass at once, as far as both limits of a burst
    allow: fewer than a train of segments (64 kB and headers) would split it, which burns a core.
    Before the link as much may wait and 256 kB more, whatever the burst: TCP that shares it needs
    them.
    """
    in_time = int(bytes_per_s * BURST_S)
    burst = min(max(in_time, LEAST_BURST), MOST_BURST)
    return f"root tbf burst {burst} limit {in_time + MOST_BURST} rate {int(bytes_per_s)}bps"


def losing(share: float) -> str:
    """The filter that drops this share of packets, as tc's bytecode. Raises ConfigError."""
    if not 0 <= share < 1:
        raise ConfigError(f"a loss of {share} of all packets, it is a share: 0 <= share < 1")
    return LOSING.format(bound=round(share * (1 << RANDOM_BITS)))


@dataclass(frozen=True)
class LabNic:
    """What a host has: `bytes_per_s` leave it and, unless said otherwise, arrive."""

    bytes_per_s: float
    switch: str = "switch"
    in_bytes_per_s: float | None = None
    loss: float = 0.0
    """Share of the packets that are lost, each way; of each alone, by chance."""

    def __post_init__(self) -> None:
        losing(self.loss)


@dataclass(frozen=True)
class End:
    """One end of a link: a device in a namespace (its file)."""

    net: Path
    device: str

    def do(self, tool: str, words: str, *more: str) -> str:
        """What the command says. `more`: words that hold blanks."""
        return command("nsenter", f"--net={self.net}", tool, *words.split(), *more)


def _send_cut_up(end: End, wanted: bool) -> None:
    """Whether what leaves as one large piece is split before it leaves, not by hardware."""
    end.do("ip", f"link set {end.device} gso_max_segs {1 if wanted else 65535}")


@dataclass(frozen=True)
class Traffic:
    """Bytes since the NIC was made, as `LabLink.traffic` or `LabLink.frames` says."""

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
            end.do("tc", f"qdisc replace dev {end.device} {limit_of(rate)}")

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
        if not self._loses(self.near):
            _send_cut_up(self.near, carried is not None)

    def set_loss(self, share: float) -> None:
        """From now on each packet is lost with this probability, each way, alone and by chance.
        Once it was called, also with 0, packets travel one by one: that costs processor time.

        Raises ConfigError for what is no share below 1.
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
        """Whole Ethernet frames, whatever is in them, as the rate counts them: what has left the
        near end, and what has left the far end for it. What was then lost counts."""
        sent, received = (
            json.loads(end.do("tc", f"-s -j qdisc show dev {end.device} root"))[0]["bytes"]
            for end in (self.near, self.far)
        )
        return Traffic(sent, received)

    def traffic(self) -> Traffic:
        """TCP payload: what has left the near end, and what has arrived there.

        The kernel counts bytes and packets; 66 bytes a packet are headers (14 + 20 + 32). What is
        not a segment with time stamps (ARP, the first packets of a connection, selective
        acknowledgements) makes an error of some bytes each. What was sent again counts again.
        """
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
