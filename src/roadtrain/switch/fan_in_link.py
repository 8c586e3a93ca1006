"""A participant's link to the server of a job that sums in the network. A participant is a worker,
or the relay of a host for its workers.

    owner (RemoteServer, a relay's ServerChannel)
      |  Link, Receiver
    FanInLink --TCP-- the server's fan-in end            all frames but bulk data
      |   ^
     UDP  UDP  the participant's switch                  integers and exponents up, parameters down

The owner uses a FanInLink like any other link. When the callback `sent` of a push is called, the
memory of the gradient may be reused. A thread of its own calls the owner, so packets are not
blocked while the owner is busy. An exception in any thread ends the link and calls the owner's
`lost`.
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

from roadtrain.chunks import PAGE, Chunk
from roadtrain.errors import LostError, PeerError, RoadtrainError, WireError
from roadtrain.retry import undone_on_error
from roadtrain.servers import frames as m
from roadtrain.switch import fixed_point, packets, streams, switch_frames
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.greeting import Participant
from roadtrain.switch.lateness import ago
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES, PAYLOAD_NBYTES, Kind, PacketKey
from roadtrain.switch.participant import ROUNDS, Gradient, Granted, Numbers, PendingPull, Pulls
from roadtrain.switch.protocol.numbered import NumberedReceiver
from roadtrain.transport.address import address_of, own_address
from roadtrain.transport.link import Receiver
from roadtrain.transport.stream import FrameStream, SentOnce
from roadtrain.transport.tcp import Address
from roadtrain.units import round_up

TRIAL_S = 1.0  # timeout for a multicast trial packet
BEGIN_S = 10.0  # timeout for `begin` to be called after the link is connected
END_S = 5.0  # timeout for a call of the owner to return
SILENT_S = 3.0  # a switch that sends no heartbeat for longer is named in the owner's errors
MAX_NONCE = 64


@dataclass
class _Member:
    """The UDP sockets of the link and their threads. Created when the switches are ready."""

    job: int
    child: int
    key: PacketKey
    sockets: list[DatagramSocket]
    sender: streams.PacketSender
    port: streams.PacketPort
    trial_until: float | None  # deadline for a trial packet; None once the result is sent
    beat: float = field(default_factory=time.monotonic)  # time of the switch's last heartbeat

    def close(self) -> None:
        self.sender.close()
        self.port.close()
        for sock in self.sockets:
            sock.close()


class FanInLink:
    """A participant's link to a server's fan-in end. Implements Link for the owner, and Receiver
    for the TCP link.

    The callback `sent` of each pushed gradient is called exactly once.
    """

    def __init__(self, owner: Receiver, participant: Participant, token: bytes | None) -> None:
        self.peer = f"the server of switch {participant.switch}"
        self._owner, self._own, self._token = owner, participant, token
        self._plan = participant.plan
        # guards `_pulls`, `_granted` and `_member`; never held while the owner is called
        self._lock = threading.Lock()
        self._pulls = Pulls()
        self._granted = Granted(participant.chunks, self._plan.width)
        # block -> number of its first chunk
        self._firsts = {chunk.block: chunk.id for chunk in reversed(participant.chunks)}
        self._received = NumberedReceiver(self._plan.window)
        self._clock = streams.BeatClock(self._plan.window)
        self._tickets: deque[bytes] = deque()  # headers of PULLED frames being received over TCP
        self._member: _Member | None = None
        self._tcp: FrameStream
        self._begun = threading.Event()  # `_tcp` is set
        # The names of the stragglers: by the server, of a silent switch, and as sent to the owner
        self._stragglers = self._silent = self._named = ""
        self._over = False  # whether packets are not sent and received any more
        self._closed = False  # whether the owner has closed the link: it is not called any more
        # calls of the owner's `arrived` or `lost`; None ends the thread
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._caller = threading.Thread(target=self._call_owner, name="call the owner", daemon=True)

    def begin(self, link: FrameStream) -> None:
        """Set the TCP link, and start the thread that calls the owner. Called once."""
        self._tcp, self.peer = link, f"{link.peer} by switch {self._own.switch}"
        self._begun.set()
        self._caller.start()

    @property
    def strangers(self) -> int:
        """Number of packets that were dropped because they lacked the job's authentication tag."""
        return self._member.port.strangers if self._member is not None else 0

    # the Link

    def send(
        self,
        kind: int,
        header: bytes,
        parts: Iterable[memoryview] = (),
        sent: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
        each: bool = False,
    ) -> None:
        if kind == m.PUSH:
            self._announce(m.header(kind, header), [*parts], sent)
            return
        if kind == m.PULL:
            self._ask(m.header(kind, header))
        self._tcp.send(kind, header, parts, sent, urgent=urgent)

    def _ask(self, pull: m.PullHeader) -> None:
        for chunk in self._chunks_of(pull):
            nbytes = round_up(chunk.weights_nbytes, PAGE)
            header = m.encode((pull.ticket, chunk.id))
            into = np.frombuffer(self._owner.room(m.PULLED, header, nbytes), np.uint8)
            with self._lock:
                self._pulls.ask(pull.ticket, (chunk.id, pull.version), into)

    def _chunks_of(self, fields: m.PullHeader | m.PushHeader) -> list[Chunk]:
        first, bits = self._firsts[fields.block], int.from_bytes(fields.chunks, "little")
        return [self._own.chunks[first + i] for i in range(bits.bit_length()) if bits >> i & 1]

    def _announce(
        self, push: m.PushHeader, parts: Sequence[memoryview], sent: Callable[[], None] | None
    ) -> None:
        chunks = self._chunks_of(push)
        if not push.dense or len(parts) != len(chunks):
            raise WireError(
                f"{self.peer}: a compressed gradient of block {push.block} cannot be summed in the"
                " network",
                hint="remove the compression or fan_in",
            )
        once = SentOnce(sent or (lambda: None))
        gradients: list[tuple[int, Gradient]] = []
        for chunk, part in zip(chunks, parts):
            dtype = m.cast_dtype(push, chunk) or ("fp32" if self._own.adds else chunk.dtype)
            kind = np.float32 if dtype == "fp32" else np.uint16
            values = np.frombuffer(part, kind, chunk.numel)
            gradients.append((chunk.id, Gradient(values, dtype, once)))
        for _ in gradients[1:]:
            once.add()
        header = m.encode((push.block, push.chunks, push.fresh, push.updated))
        with self._lock:  # so that a grant finds the gradient, and announcements keep this order
            for number, gradient in gradients:
                self._granted.announce(number, gradient)
            try:
                self._tcp.send(switch_frames.ANNOUNCE, header)
            except PeerError:
                for number, _ in gradients:
                    self._granted.take_back(number)
                raise

    def close(self) -> None:
        """Close the link, and release the gradients that are not summed yet. No gradient is lost if
        the last step is committed.
        """
        self._closed = True
        if threading.current_thread() is self._caller:  # a thread cannot join itself
            threading.Thread(target=self._close, name=f"close {self.peer}", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        self._leave()
        if self._begun.is_set():
            self._tcp.close()
        self._calls.put(None)
        if self._caller.is_alive():
            self._caller.join(END_S)

    def _leave(self) -> None:
        with self._lock:
            self._over = True
            member, self._member = self._member, None
        if member is not None:
            member.close()
        with self._lock:
            free = self._granted.give_up()
        _call(free)

    # the Receiver of the TCP link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind == switch_frames.FAN_IN:
            if nbytes > MAX_NONCE:
                raise WireError(f"{self.peer} sent a nonce of {nbytes} bytes (maximum {MAX_NONCE})")
            return memoryview(bytearray(nbytes))
        if kind == m.PULLED:
            pulled: m.PulledHeader = m.header(kind, header)
            with self._lock:
                pull = self._pulls.over_tcp(pulled.ticket, pulled.chunk)
            self._tickets.append(pull.header)
            return pull.into.data
        return self._owner.room(kind, header, nbytes)

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        match kind:
            case switch_frames.FAN_IN:
                self._begun.wait(BEGIN_S)
                self._join(m.header(kind, header), bytes(payload))
            case switch_frames.GRANT:
                with self._lock:
                    self._granted.grant(m.header(kind, header))
                    ready, member = self._granted.ready, self._member
                if member is not None:
                    member.sender.may_send(ready)
            case m.PULLED:
                self._deliver(kind, self._tickets.popleft(), payload)
            case m.PROGRESS if (progress := m.header(kind, header)).of == m.WAITS_ONLY:
                self._take_progress(progress.doing)
            case _:
                self._deliver(kind, header, payload)

    def lost(self, error: PeerError) -> None:
        self._leave()
        self._calls.put(partial(self._owner.lost, error))
        self._calls.put(None)

    def _deliver(self, kind: int, header: bytes, payload: memoryview) -> None:
        self._calls.put(partial(self._owner.arrived, kind, header, payload))

    def _call_owner(self) -> None:
        """Call the owner's methods in order, until the link is lost or closed."""
        while (call := self._calls.get()) is not None and not self._closed:
            try:
                call()
            except BaseException as error:
                self._failed(error)

    # the UDP side

    def _join(self, fan_in: switch_frames.FanInHeader, nonce: bytes) -> None:
        own, member = self._own, self._member
        node, child = self._plan.place_of(own.rank, own.count)
        child += self._plan.first_child(node, own.count)
        if fan_in.child != child:
            raise WireError(
                f"{self.peer}: this participant is child {child} of switch {node.address} in its"
                f" own plan, but child {fan_in.child} in the server's plan"
            )
        switch = (address_of(node.address)[0], fan_in.port)
        if member is not None:  # the switch was lost and has been replaced
            member.sender.to = switch
            return
        home = own_address(switch)
        up = self._socket(home)
        sockets = [up]
        with undone_on_error(up.close):
            if fan_in.group:
                sockets.append(self._socket(home, address_of(fan_in.group)))
        key = PacketKey.derive(self._token, nonce)
        sender = streams.PacketSender(
            up,
            switch,
            self._fill,
            self._failed,
            name=f"send packets {self.peer}",
        )
        trial = time.monotonic() + TRIAL_S if fan_in.group else None
        port = streams.PacketPort(
            sockets,
            key,
            fan_in.job,
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
        member = _Member(fan_in.job, child, key, sockets, sender, port, trial)
        with self._lock:
            over, self._member = self._over, member
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
            (home, 0), receive_nbytes=2 * window, send_nbytes=streams.SEND_NBYTES, group=group
        )

    def _failed(self, error: BaseException) -> None:
        if self._over:
            return
        if isinstance(error, PeerError):
            named = type(error)(f"{self.peer}: {error}")
        elif isinstance(error, RoadtrainError):
            named = WireError(f"{self.peer}: {error}")
        else:
            named = LostError(f"{self.peer}: closed because of an error on this side: {error!r}")
        named.__cause__ = error
        self._tcp.fail(named)

    # down

    def _parameters(self, batch: streams.Batch) -> None:
        done: list[tuple[PendingPull, int]] = []
        left = self._new(batch)
        headers = batch.headers
        bases = headers["number"].astype(np.int64) - headers["c"]
        while left.any():  # one iteration per broadcast
            at = int(np.argmax(left))
            a, b, base = int(headers["a"][at]), int(headers["b"][at]), int(bases[at])
            ours = left & (headers["a"] == a) & (headers["b"] == b) & (bases == base)
            left &= ~ours
            with self._lock:
                pull = self._pulls.broadcast((a, b), base)
            self._copy(batch, ours, pull)
            if not pull.missing:
                done.append((pull, base))
        for pull, base in done:
            with self._lock:
                self._pulls.whole(pull, base)
            self._deliver(m.PULLED, pull.header, pull.into.data)

    def _new(self, batch: streams.Batch) -> np.ndarray:
        """Return a mask of the packets that are not duplicates. Raises WireError for a wrong packet
        length.
        """
        if batch.segment != PACKET_NBYTES:
            raise WireError(f"bulk packets have {batch.segment} bytes, expected {PACKET_NBYTES}")
        new = batch.ok.copy()
        new[new] = self._received.accept_many(batch.numbers[new])
        self._clock.received(int(np.count_nonzero(batch.ok)))
        return new

    def _copy(self, batch: streams.Batch, ours: np.ndarray, pull: PendingPull) -> None:
        index = batch.headers["c"].astype(np.uint32)
        pull.take(index[ours])
        packets.copy_out(batch.buffer, ours, index, pull.into)

    def _maxima(self, batch: streams.Batch) -> None:
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
            ready, member = self._granted.ready, self._member
        if member is not None:
            member.sender.may_send(ready)

    def _heartbeats(self, batch: streams.Batch) -> None:
        member = self._member
        if member is None:
            return
        acked, member.beat = 0, time.monotonic()
        for beat, _, _ in streams.beats_of(batch):
            acked = max(acked, member.sender.heartbeat(beat))
        with self._lock:
            free = self._granted.acked(acked)
        _call(free)

    def _trial(self, batch: streams.Batch) -> None:
        self._settle_trial(True)

    def _settle_trial(self, reached: bool) -> None:
        """Send the result of the multicast trial to the server, once."""
        with self._lock:
            member = self._member
            if member is None or member.trial_until is None:
                return
            member.trial_until = None
        with suppress(LostError):
            self._tcp.send(switch_frames.TRIAL_RESULT, m.encode((reached,)))

    def _tick(self) -> None:
        member = self._member
        if member is None:
            return
        now = time.monotonic()
        if member.trial_until is not None and now > member.trial_until:
            self._settle_trial(False)
        self._check_silent(member)
        if self._clock.due(now):
            packet = streams.beat_packet(
                member.key,
                member.job,
                Kind.PARAMETER_BEAT,
                self._received.heartbeat(),
                sender=member.child,
                b=self._own.rank,
            )
            member.sockets[0].send(packet, packet.size, member.sender.to)

    def _take_progress(self, doing: str) -> None:
        """Note the server's report of stragglers. An empty report cancels an earlier one."""
        with self._lock:
            self._stragglers = doing
            self._name_stragglers()

    def _check_silent(self, member: _Member) -> None:
        # only heartbeats: multicast parameters come from the server, without the switch
        for_s = time.monotonic() - member.beat
        if (for_s > SILENT_S) == bool(self._silent):
            return
        silent = f"switch {self._own.switch}, which has sent no packet since {ago(for_s)}"
        with self._lock:
            self._silent = silent if for_s > SILENT_S else ""
            self._name_stragglers()

    def _name_stragglers(self) -> None:
        """Notify the owner of the stragglers that the server has named and of a silent switch, if
        they have changed. The caller holds `_lock`.
        """
        silent = "" if f"switch {self._own.switch}," in self._stragglers else self._silent
        named = "; ".join(filter(None, (self._stragglers, silent)))
        if named != self._named:
            self._named = named
            self._deliver(m.PROGRESS, m.encode((named, 0, m.WAITS_ONLY)), memoryview(b""))

    # up

    def _fill(self, first: int, count: int, staging: np.ndarray) -> int:
        """Write the packets with unacknowledged numbers in [first, first + count) to `staging`,
        with tags. Returns their number.
        """
        with self._lock:
            if (member := self._member) is None:
                return 0
            pieces = self._granted.make(first, count)
        done = 0
        try:
            for run, packet, number in pieces:
                self._write(member, run, packet, number, staging[done * PACKET_NBYTES :])
                done += number
            packets.seal(staging, PACKET_NBYTES, done, member.key)
        finally:
            with self._lock:
                free, over = self._granted.made(), self._over
            _call(free)
        # after `_leave` the owner may already have reused the memory that was read
        return 0 if over else done

    def _write(
        self, member: _Member, run: Numbers, packet: int, count: int, into: np.ndarray
    ) -> None:
        round, width = run.round, self._plan.width
        packets.write_headers(
            into,
            PACKET_NBYTES,
            count,
            kind=run.kind,
            job=member.job,
            first=run.first + packet,
            sender=member.child,
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
