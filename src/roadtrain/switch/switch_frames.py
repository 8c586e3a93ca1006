"""Frames of a job that sums in the network, beside its packets.

    worker <-> fan-in end  Announce Heard | FanIn Grant;  fan-in end <-> switch  | SwitchReady

servers/frames.py has what all frames have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from roadtrain.servers import frames as m
from roadtrain.servers.frames import Hello
from roadtrain.switch.options import MOST_CHILDREN, WINDOWS
from roadtrain.switch.packets import ROOT

# worker <-> the fan-in end in front of its server, switch -> fan-in end
ANNOUNCE = 44
HEARD = 45
FAN_IN = 46
GRANT = 47
SWITCH_READY = 48


class AnnounceHeader(NamedTuple):
    """A worker has a gradient of the chunk to be summed: its next one of this chunk."""

    chunk: int
    fresh: bool  # the first of its step: it replaces what is held


class HeardHeader(NamedTuple):
    trial: bool  # the network's own multicast has come through


class FanInHeader(NamedTuple):
    """All that a worker needs to take part; said once the switches are ready. The payload is the
    nonce that the keys of the packets are derived with."""

    job: int  # of the packets
    child: int  # what this worker calls itself to its switch
    port: int  # of the switch, where this job's datagrams go; its host is the plan's
    delay_ms: int  # that this worker waits longer than worker 0 before it sends again
    group: str  # HOST:PORT of the network's multicast; empty: the switches copy


class GrantHeader(NamedTuple):
    """All workers have announced the chunk, or closed it: its exponents are wanted."""

    chunk: int
    round: int  # counts the sums of this chunk, from 1
    first: int  # number of the first packet of exponents
    # what this worker adds: the first of what it has announced and was not granted; else zeros. It
    # cannot know: what it has announced may be of its next step already.
    announced: bool


class SwitchReadyHeader(NamedTuple):
    port: int  # where the job's datagrams go
    slots: int  # of the table, that the job has


HEADERS: Mapping[int, Any] = {
    ANNOUNCE: AnnounceHeader,
    HEARD: HeardHeader,
    FAN_IN: FanInHeader,
    GRANT: GrantHeader,
    SWITCH_READY: SwitchReadyHeader,
}
m.declare(HEADERS)


class FanInHello(NamedTuple):
    """The greeting of a worker (or relay) of a job that sums in the network."""

    hello: Hello
    # The job's switch/options.py: (address, parent, workers) of each switch, wire, window,
    # multicast
    switches: tuple[tuple[str, str, tuple[int, ...]], ...]
    wire: str
    window: int
    multicast: str


# begins the greeting of a fan-in end to a switch; SwitchHello is the rest
SWITCH_GREETING = b"roadtrain switch "


class SwitchHello(NamedTuple):
    """A job asks a switch to sum and copy for it, until this link ends."""

    session: str  # for people
    job: Annotated[int, Meta(ge=0, lt=1 << 32)]  # of the packets
    # what the keys of the packets are derived with
    nonce: Annotated[bytes, Meta(min_length=16, max_length=64)]
    children: Annotated[int, Meta(ge=1, le=MOST_CHILDREN)]
    slots: Annotated[int, Meta(ge=1, le=WINDOWS[-1])]  # of the table that it asks for
    # what this switch calls itself to its parent; the root: packets.ROOT
    child: Annotated[int, Meta(ge=0, le=ROOT)]
    # where datagrams to the parent go; of the root those to the server
    parent: tuple[str, Annotated[int, Meta(ge=1, lt=1 << 16)]]
    # where datagrams came before this switch was lost; 0: any
    port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    # what its child 0 calls itself in packets, the next child one more
    first: Annotated[int, Meta(ge=0)] = 0


FAN_IN_HELLO = msgspec.msgpack.Decoder(FanInHello)
SWITCH_HELLO = msgspec.msgpack.Decoder(SwitchHello)
