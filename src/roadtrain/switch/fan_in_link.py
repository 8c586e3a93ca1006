"""FanInLink: a participant's way to a server whose job sums in the network. A participant is a
worker, or a relay that communicates for the workers of its host.

    owner (RemoteServer, a relay's ServerChannel)
      |  Link, Receiver
    FanInLink --TCP-- the server's fan-in end            all frames but the bulk
      |   ^
     UDP  UDP  the participant's switch                  integers and exponents up, parameters down

To its owner it is a link like any other: a gradient's memory is free when `sent` is called, and
parameters arrive as PULLED. Order: what is said after a push goes by TCP behind its announcement,
and the end holds it back until the sum is there.

Threads: those of the TCP link; one that sends packets; one that receives them; one that calls
the owner. An owner that is at work, or waits for memory that a sum is to free, so never keeps the
others from packets and grants; where a pull goes is asked when it is sent. What a thread raises
ends the link, and the owner hears of it by `lost`, with the server and the switch. Does NOT know
which frames belong to a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np

from roadtrain.chunks import PAGE
from roadtrain.errors import LostError, PeerError, RoadtrainError, WireError
from roadtrain.retry import undone_on_error
from roadtrain.servers import frames as m
from roadtrain.switch import fixed_point, packets, switch_frames
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.greeting import Participant
from roadtrain.switch.lateness import ago
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.participant import ROUNDS, Asked, Gradient, Granted, Numbers, Pulls
from roadtrain.switch.protocol.numbered import NumberedReceiver
from roadtrain.switch.streams import (
    SEND_NBYTES,
    Batch,
    BeatClock,
    PacketPort,
    PacketSender,
    beat_packet,
    beats_of,
)
from roadtrain.transport.address import address_of, own_address
from roadtrain.transport.link import Receiver
from roadtrain.transport.stream import FrameStream
from roadtrain.transport.tcp import Address
from roadtrain.units import round_up

TRIAL_S = 1.0  # for a word by the network's own multicast
BEGIN_S = 10.0  # for the thread that connects to have the link
END_S = 5.0  # for the owner to return
SILENT_S = 3.0  # without a packet
MAX_NONCE = 64


@dataclass
class _Joined:
    """The datagrams' half, from when FAN_IN has come."""

    job: int
    child: int
    key: PacketKey
    sockets: list[DatagramSocket]
    sender: PacketSender
    port: PacketPort
    trial_until: float | None  # when it is given up that the network copies; None: settled
    came: int = 0  # packets with the job's tag
    last: float = field(default_factory=time.monotonic)  # when that changed
    silent: bool = False  # the owner knows that none come

    def close(self) -> None:
        self.sender.close()
        self.port.close()
        for one in self.sockets:
            one.close()


class FanInLink:
    """A Link to its owner; the Receiver of the TCP link.

    Invariants: `_pulls`, `_granted` and `_joined` are guarded by `_lock`, which is never held while
    the owner is called. What the owner pushed is told free exactly once."""

    def __init__(self, owner: Receiver, participant: Participant, token: bytes | None) -> None:
        self.peer = f"the server of switch {participant.switch}"
        self._owner, self._own, self._token = owner, participant, token
        self._plan = participant.plan
        self._lock = threading.Lock()
        self._pulls = Pulls()
        self._granted = Granted(participant.chunks, self._plan.width)
        self._received = NumberedReceiver(self._plan.window)
        self._clock = BeatClock(self._plan.window)
        self._tickets: deque[bytes] = deque()  # headers of PULLED frames that got room over TCP
        self._joined: _Joined | None = None
        self._tcp: FrameStream
        self._begun = threading.Event()  # `_tcp` is there
        self._server_names = False  # it has said who does not answer
        self._over = False  # no packets any more
        self._closed = False  # by the owner: it hears nothing any more
        # calls of the owner, which tell it of a frame or how the link was lost; None: no more
        self._heard: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="tell the owner", daemon=True)

    def begin(self, link: FrameStream) -> None:
        """Once, with the TCP link of which this is the Receiver."""
        self._tcp, self.peer = link, f"{link.peer} by switch {self._own.switch}"
        self._begun.set()
        self._teller.start()

    @property
    def strangers(self) -> int:
        """Packets without the job's tag, which changed nothing."""
        return self._joined.port.strangers if self._joined is not None else 0

    # the Link

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Sequence[memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        if kind == m.PUSH:
            self._announce(m.header(kind, header), parts, sent)
            return
        if kind == m.PULL:
            self._ask(m.header(kind, header))
        self._tcp.send(kind, header, parts, sent, urgent=urgent)

    def _ask(self, pull: m.PullHeader) -> None:
        nbytes = round_up(self._own.chunks[pull.chunk].weights_nbytes, PAGE)
        header = m.encode((pull.ticket, pull.chunk))
        into = np.frombuffer(self._owner.room(m.PULLED, header, nbytes), np.uint8)
        with self._lock:
            self._pulls.ask(pull, into)

    def _announce(
        self, push: m.PushHeader, parts: Sequence[memoryview], sent: Callable[[], None] | None
    ) -> None:
        if not push.dense or len(parts) != 1:
            raise WireError(
                f"{self.peer}: a compressed gradient of chunk {push.chunk} is not summed in the"
                " network",
                hint="leave out the compression, or the fan-in",
            )
        chunk = self._own.chunks[push.chunk]
        dtype = push.dtype or ("fp32" if self._own.adds else chunk.dtype)
        kind = np.float32 if dtype == "fp32" else np.uint16
        values = np.frombuffer(parts[0], kind, chunk.numel)
        gradient = Gradient(values, dtype, sent or (lambda: None))
        with self._lock:  # so that a grant finds it, and announcements go in this order
            self._granted.announce(push.chunk, gradient)
            try:
                self._tcp.send(switch_frames.ANNOUNCE, m.encode((push.chunk, push.fresh)))
            except PeerError:
                self._granted.take_back(push.chunk)
                raise

    def close(self) -> None:
        """Gradients that were not summed yet are told free: a step that was committed has none."""
        self._closed = True
        if threading.current_thread() is self._teller:  # it cannot wait for itself
            threading.Thread(target=self._close, name=f"close {self.peer}", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        self._leave()
        if self._begun.is_set():
            self._tcp.close()
        self._heard.put(None)
        if self._teller.is_alive():
            self._teller.join(END_S)

    def _leave(self) -> None:
        """The datagrams' half ends."""
        with self._lock:
            self._over = True
            joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()
        with self._lock:
            free = self._granted.give_up()
        _call(free)

    # the Receiver of the TCP link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind == switch_frames.FAN_IN:
            if nbytes > MAX_NONCE:
                raise WireError(f"a nonce of {nbytes} bytes, {MAX_NONCE} are allowed")
            return memoryview(bytearray(nbytes))
        if kind == m.PULLED:
            said: m.PulledHeader = m.header(kind, header)
            with self._lock:
                asked = self._pulls.over_tcp(said.ticket, said.chunk)
            self._tickets.append(asked.header)
            return asked.into.data
        return self._owner.room(kind, header, nbytes)

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        match kind:
            case switch_frames.FAN_IN:
                self._begun.wait(BEGIN_S)
                self._join(m.header(kind, header), bytes(payload))
            case switch_frames.GRANT:
                with self._lock:
                    self._granted.grant(m.header(kind, header))
                    ready, joined = self._granted.ready, self._joined
                if joined is not None:
                    joined.sender.may_send(ready)
            case m.PULLED:
                self._has_arrived(kind, self._tickets.popleft(), payload)
            case m.PROGRESS if (progress := m.header(kind, header)).of == m.WAITS_ONLY:
                self._hear_who_is_silent(progress.doing, header)
            case _:
                self._has_arrived(kind, header, payload)

    def lost(self, error: PeerError) -> None:
        self._leave()
        self._heard.put(partial(self._owner.lost, error))
        self._heard.put(None)

    def _has_arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self._heard.put(partial(self._owner.arrived, kind, header, payload))

    def _tell(self) -> None:
        """Its own thread: the owner hears all, in order, until the link is lost or closed."""
        while (tell := self._heard.get()) is not None and not self._closed:
            try:
                tell()
            except BaseException as error:
                self._failed(error)

    # the datagrams' half

    def _join(self, said: switch_frames.FanInHeader, nonce: bytes) -> None:
        own, joined = self._own, self._joined
        node, child = self._plan.place_of(own.rank, own.count)
        child += self._plan.first_child(node, own.count)
        if said.child != child:
            raise WireError(
                f"{self.peer}: this is child {child} of switch {node.address} by the plan, the"
                f" server said {said.child}"
            )
        switch = (address_of(node.address)[0], said.port)
        if joined is not None:  # it was lost, and another takes its place
            joined.sender.to = switch
            return
        home = own_address(switch)
        up = self._socket(home)
        sockets = [up]
        with undone_on_error(up.close):
            if said.group:
                sockets.append(self._socket(home, address_of(said.group)))
        key = PacketKey.derive(self._token, nonce)
        sender = PacketSender(
            up,
            switch,
            self._fill,
            self._failed,
            name=f"send packets {self.peer}",
            delay_s=said.delay_ms / 1e3,
        )
        trial = time.monotonic() + TRIAL_S if said.group else None
        port = PacketPort(
            sockets,
            key,
            said.job,
            {
                Kind.PARAMETERS: self._parameters,
                Kind.MAXIMA: self._maxima,
                Kind.GRADIENT_BEAT: self._heartbeats,
                Kind.TRIAL: self._trial,
            },
            self._failed,
            name=f"receive packets {self.peer}",
            tick=self._tick,
        )
        joined = _Joined(said.job, child, key, sockets, sender, port, trial)
        with self._lock:
            over, self._joined = self._over, joined
            ready = self._granted.ready
        if over:
            self._leave()
            return
        sender.may_send(ready)
        sender.start()
        port.start()

    def _socket(self, home: str, group: Address | None = None) -> DatagramSocket:
        window = self._plan.window * PACKET_NBYTES
        return DatagramSocket(
            (home, 0), receive_nbytes=2 * window, send_nbytes=SEND_NBYTES, group=group
        )

    def _failed(self, error: BaseException) -> None:
        """Of a thread of packets."""
        if self._over:
            return
        if isinstance(error, PeerError):
            told = type(error)(f"{self.peer}: {error}")
        elif isinstance(error, RoadtrainError):
            told = WireError(f"{self.peer}: {error}")
        else:
            told = LostError(f"{self.peer}: given up, because this side failed: {error!r}")
        told.__cause__ = error
        self._tcp.fail(told)

    # down

    def _parameters(self, batch: Batch) -> None:
        done: list[tuple[Asked, int]] = []
        left = self._new(batch)
        headers = batch.headers
        bases = headers["number"].astype(np.int64) - headers["c"]
        while left.any():  # one broadcast after the other
            at = int(np.argmax(left))
            a, b, base = int(headers["a"][at]), int(headers["b"][at]), int(bases[at])
            ours = left & (headers["a"] == a) & (headers["b"] == b) & (bases == base)
            left &= ~ours
            with self._lock:
                asked = self._pulls.broadcast((a, b), base)
            self._copy(batch, ours, asked)
            if not asked.missing:
                done.append((asked, base))
        for asked, base in done:
            with self._lock:
                self._pulls.whole(asked, base)
            self._has_arrived(m.PULLED, asked.header, asked.into.data)

    def _new(self, batch: Batch) -> np.ndarray:
        """Which packets have not come before. Raises WireError for packets of another length."""
        if batch.segment != PACKET_NBYTES:
            raise WireError(f"packets of {batch.segment} bytes came, bulk has {PACKET_NBYTES}")
        new = batch.ok.copy()
        new[new] = self._received.came_many(batch.numbers[new])
        self._clock.came(int(np.count_nonzero(batch.ok)))
        return new

    def _copy(self, batch: Batch, ours: np.ndarray, asked: Asked) -> None:
        index = batch.headers["c"].astype(np.uint32)
        asked.take(index[ours])
        packets.copy_out(batch.buffer, ours, index, asked.into)

    def _maxima(self, batch: Batch) -> None:
        new = self._new(batch)
        with self._lock:
            for i in np.flatnonzero(new):
                header, at = batch.headers[i], int(i) * batch.segment + HEADER_NBYTES
                self._granted.maxima(
                    int(header["a"]),
                    int(header["b"]),
                    int(header["c"]),
                    int(header["credit"]),
                    batch.buffer[at : at + PAYLOAD_NBYTES],
                )
            ready, joined = self._granted.ready, self._joined
        if joined is not None:
            joined.sender.may_send(ready)

    def _heartbeats(self, batch: Batch) -> None:
        joined = self._joined
        if joined is None:
            return
        acked = 0
        for beat, _, _ in beats_of(batch):
            acked = max(acked, joined.sender.heartbeat(beat))
        with self._lock:
            free = self._granted.acked(acked)
        _call(free)

    def _trial(self, batch: Batch) -> None:
        self._settle_trial(True)

    def _settle_trial(self, heard: bool) -> None:
        """Whether the network copies. HEARD is said once."""
        with self._lock:
            joined = self._joined
            if joined is None or joined.trial_until is None:
                return
            joined.trial_until = None
        with suppress(LostError):
            self._tcp.send(switch_frames.HEARD, m.encode((heard,)))

    def _tick(self) -> None:
        joined = self._joined
        if joined is None:
            return
        if joined.trial_until is not None and time.monotonic() > joined.trial_until:
            self._settle_trial(False)
        self._see_who_is_silent(joined)
        if self._clock.due():
            packet = beat_packet(
                joined.key,
                joined.job,
                Kind.PARAMETER_BEAT,
                self._received.heartbeat(),
                sender=joined.child,
                b=self._own.rank,
            )
            joined.sockets[0].send(packet, packet.size, joined.sender.to)

    def _hear_who_is_silent(self, words: str, header: bytes) -> None:
        """Let the server's words replace the observation made here; without any it stands."""
        with self._lock:
            if not words and not self._server_names:
                return
            self._server_names = bool(words)
            if self._joined is not None:
                self._joined.silent = False
            self._has_arrived(m.PROGRESS, header, memoryview(b""))

    def _see_who_is_silent(self, joined: _Joined) -> None:
        """Heartbeats come by the switch twice a second. Where none do, the owner's errors say so,
        unless the server knows more."""
        came, now = joined.port.packets - joined.port.strangers, time.monotonic()
        if came != joined.came:
            joined.came, joined.last = came, now
        for_s = now - joined.last
        silent = for_s > SILENT_S
        with self._lock:
            if self._server_names or silent == joined.silent:
                return
            joined.silent = silent
            words = f"switch {self._own.switch}, from which no packet has come since {ago(for_s)}"
            header = m.encode((words if silent else "", 0, m.WAITS_ONLY))
            self._has_arrived(m.PROGRESS, header, memoryview(b""))

    # up

    def _fill(self, first: int, count: int, staging: np.ndarray) -> int:
        """For the sender's thread."""
        with self._lock:
            if (joined := self._joined) is None:
                return 0
            pieces = self._granted.make(first, count)
        done = 0
        try:
            for run, packet, number in pieces:
                self._write(joined, run, packet, number, staging[done * PACKET_NBYTES :])
                done += number
            packets.seal(staging, PACKET_NBYTES, done, joined.key)
        finally:
            with self._lock:
                free, over = self._granted.made(), self._over
            _call(free)
        # what was given up meanwhile is its owner's again, and may have changed while it was read
        return 0 if over else done

    def _write(
        self, joined: _Joined, run: Numbers, packet: int, count: int, into: np.ndarray
    ) -> None:
        round, width = run.round, self._plan.width
        packets.write_headers(
            into,
            PACKET_NBYTES,
            count,
            kind=run.kind,
            job=joined.job,
            first=run.first + packet,
            sender=joined.child,
            width=width if run.kind is Kind.GRADIENT else 0,
            a=round.chunk,
            b=round.round % ROUNDS,
            c=packet,
        )
        of_run = into[: count * PACKET_NBYTES]
        if run.kind is Kind.EXPONENTS:
            packets.copy_in(of_run, round.exponents(), packet)
            return
        gradient = round.gradient
        fixed_point.quantize(
            gradient.values,
            gradient.dtype,
            round.maxima[: round.blocks],
            self._own.count,
            width,
            packet,
            of_run,
        )


def _call(free: Iterable[Callable[[], None]]) -> None:
    for sent in free:
        sent()
