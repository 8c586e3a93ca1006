"""TCP frames of a job whose gradients are summed in the network. The UDP packets are in packets.py.

    worker -> fan-in end: Announce, TrialResult    fan-in end -> worker: FanIn, Grant
    switch -> fan-in end: SwitchReady

servers/frames.py defines the encoding.
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

# kinds of frames
ANNOUNCE = 44
TRIAL_RESULT = 45
FAN_IN = 46
GRANT = 47
SWITCH_READY = 48


class AnnounceHeader(NamedTuple):
    """Header of the Announce frame: a worker announces its next gradients of chunks (see
    servers/frames.py), which are to be summed.
    """

    block: int
    chunks: bytes
    fresh: bool  # whether this is the step's first gradient, which replaces the server's sum
    updated: bool  # whether the update that was sent before follows each gradient


class TrialResultHeader(NamedTuple):
    trial: bool  # whether a trial packet arrived by the network's own multicast


class FanInHeader(NamedTuple):
    """Header of the FanIn frame, which a worker gets when the switches are ready. The payload is
    the nonce from which the keys of packets are derived.
    """

    job: int  # job number in the packets
    child: int  # sender number of this worker in packets to its switch
    port: int  # UDP port of this job at the worker's switch, whose host is in the FanIn
    group: str  # HOST:PORT of the multicast group; empty if there is none and the switches copy


class GrantHeader(NamedTuple):
    """Header of the Grant frame: the fan-in end requests the exponents of a worker's gradient of a
    chunk. Each worker has announced a gradient of the chunk, or closed it.
    """

    chunk: int
    round: int  # counts the sums of this chunk, from 1
    first: int  # number of the first packet of exponents
    # True: the worker sends the oldest gradient that it has announced and that is not granted yet.
    # False: the worker sends zeros. The worker cannot decide this by itself, because a gradient
    # that it has announced may belong to its next step.
    announced: bool


class SwitchReadyHeader(NamedTuple):
    port: int  # UDP port for this job's datagrams
    slots: int  # slots of the table that the job has got


HEADERS: Mapping[int, Any] = {
    ANNOUNCE: AnnounceHeader,
    TRIAL_RESULT: TrialResultHeader,
    FAN_IN: FanInHeader,
    GRANT: GrantHeader,
    SWITCH_READY: SwitchReadyHeader,
}
m.declare(HEADERS)


class FanInHello(NamedTuple):
    """The greeting of a worker or relay to a fan-in end."""

    hello: Hello
    # The job's FanIn (switch/options.py): (address, parent, workers) of each switch, then its other
    # options.
    switches: tuple[tuple[str, str, tuple[int, ...]], ...]
    wire: str
    window: int
    multicast: str


# The greeting of a fan-in end to a switch: this prefix, then an encoded SwitchHello.
SWITCH_GREETING = b"roadtrain switch "


class SwitchHello(NamedTuple):
    """A request of a fan-in end to a switch: sum and copy the packets of this job until the link
    ends.
    """

    session: str  # shown to users
    job: Annotated[int, Meta(ge=0, lt=1 << 32)]  # job number in the packets
    # the packets' keys are derived from it
    nonce: Annotated[bytes, Meta(min_length=16, max_length=64)]
    children: Annotated[int, Meta(ge=1, le=MOST_CHILDREN)]
    slots: Annotated[int, Meta(ge=1, le=WINDOWS[-1])]  # requested size of the table
    # sender number of this switch in packets to its parent; the root: packets.ROOT
    child: Annotated[int, Meta(ge=0, le=ROOT)]
    # host and UDP port of the parent; of the fan-in end for the root
    parent: tuple[str, Annotated[int, Meta(ge=1, lt=1 << 16)]]
    # UDP port that the job had at this switch before the link was lost; 0: any
    port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    # sender number of child 0 in packets; the other children have the following numbers
    first: Annotated[int, Meta(ge=0)] = 0


FAN_IN_HELLO = msgspec.msgpack.Decoder(FanInHello)
SWITCH_HELLO = msgspec.msgpack.Decoder(SwitchHello)
