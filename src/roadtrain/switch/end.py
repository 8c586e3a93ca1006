"""The fan-in end: a part of a server's process. It receives the sums that the job's switches send,
and sends parameters to all participants. A participant is a worker, or the relay of a host for the
workers of this host.

    participants --TCP--> FanInEnd --local link--> ServerSession       all frames but bulk data
    switches     ==UDP==> FanInEnd: exponents, sums                    Incoming
    switches     <==UDP== FanInEnd: parameters, maxima                 Outgoing

To the server, all participants together look like one relay that pushes sums in fp32. The state
machine is in switch/protocol/fan_in.py. The fan-in end does NOT restart switches, and stores
nothing on disk.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roadtrain.chunks import PAGE, Block, Chunk
from roadtrain.device.buffers import Buffer
from roadtrain.errors import BusyError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.kernels.cast import cast_in_place
from roadtrain.servers import frames as m
from roadtrain.servers.intermediary import IntermediarySession
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.blocks import chunks_in
from roadtrain.servers.server_session import ServerSession, StoreHost
from roadtrain.storage.meta import StoreMeta
from roadtrain.switch import fixed_point, switch_frames, trial
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.end_streams import (
    ExpectedRun,
    Incoming,
    Outgoing,
    OutgoingBytes,
    derive_fan_in,
)
from roadtrain.switch.fixed_point import load_kernels
from roadtrain.switch.greeting import check_same, plan_of
from roadtrain.switch.lateness import Lateness, since
from roadtrain.switch.packets import PACKET_NBYTES, ROOT, Kind, PacketKey
from roadtrain.switch.protocol import fan_in
from roadtrain.switch.protocol.chunk_queue import Announce
from roadtrain.switch.registration import RESTART, JobTree, Registration
from roadtrain.switch.streams import (
    SEND_NBYTES,
    Batch,
    BeatClock,
    PacketPort,
    PacketSender,
    beat_packet,
    beats_of,
)
from roadtrain.transport import local
from roadtrain.transport.address import address_of, own_address
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import round_up, show_bytes

END_S = 10.0  # timeout for the threads to end
UP_S = 60.0  # timeout for the link inside this process
CHECK_S = 0.25  # interval between checks for stragglers
STUCK_S = 1.0  # a round that makes no progress for longer counts as stuck


class FanInConnection(ParameterConnection):
    """The connection of a participant, which announces gradients and sends them over UDP."""

    session: FanInEnd

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if kind == m.PUSH:
            raise self._pushed()
        return super().find_room(kind, fields, nbytes)

    def take(self, kind: int, fields: Any, payload: memoryview) -> None:
        match kind:
            case switch_frames.ANNOUNCE:
                self._announced(fields)
            case switch_frames.TRIAL_RESULT:
                self.session.trial_answered(self.rank, fields.trial)
            case m.PUSH:
                raise self._pushed()
            case _:
                super().take(kind, fields, payload)

    def _announced(self, fields: switch_frames.AnnounceHeader) -> None:
        for chunk in chunks_in(*self.named(fields)):
            if not chunk.trainable:
                raise WireError(
                    f"{self.link.peer} announced a gradient of the frozen chunk {chunk.id}"
                )
            self.session.post(Announce(chunk.id, fields.fresh, self.rank))
            if fields.updated:
                self.update_after(chunk)

    def _pushed(self) -> WireError:
        return WireError(f"{self.link.peer} pushed a gradient over TCP instead of announcing it")


class FanInEnd(IntermediarySession):
    """The fan-in end of a job. Raises ConfigError if the job's FanIn is invalid, and LostError if
    there is no route to the root switch.
    """

    name = "fan-in"
    connection_class = FanInConnection
    machine: fan_in.FanInStateMachine  # set once the layout is known

    def __init__(
        self, greeting: switch_frames.FanInHello, host: StoreHost, options: TcpOptions
    ) -> None:
        hello = greeting.hello
        super().__init__(hello.workers, stands_for=max(-hello.local, 1), deadline_s=UP_S)
        self.first, self.host, self.plan = greeting, host, plan_of(greeting)
        self._all = self.workers * self._stands_for  # number of workers of the job
        self._chunks: list[Chunk] = []
        self._sums: list[Buffer] = []  # sum buffers, by number
        self._tickets = itertools.count(1)  # identify the pushed buffers to the server
        # `lock` guards `_maxima` and `_ports`
        self._maxima: dict[tuple[int, int], np.ndarray] = {}  # (chunk, round) -> uint8 [blocks]
        self._ports: dict[str, int] = {}  # UDP ports of the switches, once all are ready
        self._lateness = Lateness(self.workers, self.plan.root.address)
        self._checked = time.monotonic()
        self._sent_silent = False  # whether the last PROGRESS to participants named a straggler
        self._apart = 0  # `machine.apart` at the last check
        self._job, self._nonce = secrets.randbits(32), secrets.token_bytes(16)
        self._key = PacketKey.derive(options.token, self._nonce)
        self._root = address_of(self.plan.root.address)
        home = own_address(self._root)
        window = self.plan.window * PACKET_NBYTES
        self._socket = DatagramSocket(
            (home, 0), receive_nbytes=2 * window, send_nbytes=SEND_NBYTES, report=host.report
        )
        self._to_root: Address = self._root  # the job's port at the switch is filled in later
        multicast = self.plan.multicast == "auto"
        self._group = trial.group_of(self._job, home) if multicast else None
        self._trial = trial.MulticastTrial(self.workers) if self._group else None
        self._incoming = Incoming(self.plan.window, self.plan.width, self.workers)
        self._outgoing = Outgoing(self._job, self._key)
        self._sender = PacketSender(  # started once its destination is decided
            self._socket,
            self._root,
            self._outgoing.fill,
            self._failed,
            name=f"send parameters {hello.session}",
        )
        self._clock = BeatClock(self.plan.window)
        self.refused = 0  # packets with the job's tag that were not sent by the root
        self._port = PacketPort(
            [self._socket],
            self._key,
            self._job,
            {
                Kind.EXPONENTS: self._take,
                Kind.GRADIENT: self._take,
                Kind.PARAMETER_BEAT: self._beats,
            },
            self._failed,
            name=f"receive sums {hello.session}",
            tick=self._tick,
        )
        self._registration = Registration(
            JobTree(
                self.plan, self.workers, hello.session, self._job, self._nonce, self._socket.address
            ),
            options,
            ready=self._switches_ready,
            failed=self._failed,
            report=host.report,
        )
        summed = -self._all if self._all > 1 else 1
        up = m.Hello(hello.session, 0, 1, summed, hello.server, hello.signature)
        self.server = ServerSession(up, host, self._plan_memory)

    # participants

    @staticmethod
    def greeting(rest: bytes) -> switch_frames.FanInHello:
        """Decode a participant's greeting. Raises WireError if it is malformed."""
        return m.decoded(switch_frames.FAN_IN_HELLO, rest, "invalid greeting of a fan-in")

    def is_of(self, hello: m.Hello) -> bool:
        """Return whether a participant belongs to the same start of the job as this fan-in end."""
        ours = self.first.hello
        return (hello.session, hello.workers, hello.local) == (
            ours.session,
            ours.workers,
            ours.local,
        )

    def busy(self) -> BusyError:
        return BusyError(
            f"busy with a session of {self.workers} participant(s) in a fan-in, at step"
            f" {self.server.step}"
        )

    def accept(self, link: Link, greeting: switch_frames.FanInHello) -> ParameterConnection:
        """Add a participant. Raises ForeignError if its greeting contradicts that of the first
        participant.
        """
        check_same(self.first, greeting)
        with self.lock:
            worker = self.join(greeting.hello.rank, link)
            worker.signature = greeting.hello.signature
            if not self._connected.is_set():
                self._begin(greeting.hello)
        return worker

    def _begin(self, hello: m.Hello) -> None:
        try:
            self._up = local.connect(
                lambda link, _: self.server.admit(0, link, hello.signature),
                self,
                name=f"server {hello.server}",
            )
        except BaseException as error:
            self.end(error)
            raise
        self._connected.set()
        self._port.start()
        self._registration.start()

    def prepare(self, worker: ParameterConnection) -> None:
        if self._ports:
            self._send_fan_in(worker)

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        if all_gone or not self._chunks:
            self.end(error)
        else:
            self.post(messages.PeerLost(rank, str(error)))

    @property
    def blocks(self) -> Sequence[Block]:
        return self.server.blocks

    def chunk(self, number: int) -> Chunk:
        return self.server.chunk(number)

    # memory

    def _plan_memory(self, meta: StoreMeta, number: int, nbytes: int) -> int:
        """Allocate the buffers, and return how many of the server's `nbytes` this fan-in end
        uses.
        """
        budgets = derive_fan_in(meta.table, meta.owned(number), nbytes)
        total = budgets.total + self._socket.receive_nbytes + SEND_NBYTES  # with kernel buffers
        with self.lock:
            self.table, self._chunks = meta.table, list(meta.table.chunks)
            self._copies = [Buffer(budgets.piece_bytes) for _ in range(budgets.buffers)]
            self._sums = [Buffer(budgets.scratch_bytes) for _ in range(budgets.buffers)]
            self.machine = fan_in.FanInStateMachine(
                self.workers,
                budgets.buffers,
                budgets.buffers,
                self._packets_of,
                time.monotonic(),
                replicated=meta.replicas > 1,
            )
        self.host.report(
            f"fan-in: {self.workers} participant(s), sums as {self.plan.wire},"
            f" {show_bytes(total)} of buffers"
        )
        return total

    def _packets_of(self, number: int) -> tuple[int, int]:
        elements = self._chunks[number].numel
        gradient = fixed_point.packets_of(elements, self.plan.width)
        return fixed_point.exponent_packets_of(elements), gradient

    # switches

    def _switches_ready(self, ports: dict[str, int]) -> None:
        root = self.plan.root.address
        load_kernels(self.plan.width)
        with self.lock:
            self._ports, self._to_root = ports, (self._root[0], ports[root])
            for worker in self.connections.values():
                self._send_fan_in(worker)
            if self._trial is None:
                self._send_to(self._to_root)
        self.host.report(
            f"fan-in: {len(ports)} switch(es) ready, the root {root}; a window of"
            f" {self.plan.window} packets"
        )

    def _send_fan_in(self, worker: ParameterConnection) -> None:
        """Send a participant the job's UDP port at its switch, and its sender number. The caller
        holds `lock`.
        """
        rank, group = worker.rank, "" if self._trial is None else "{}:{}".format(*self._group or ())
        switch, child = self.plan.place_of(rank, self.workers)
        child += self.plan.first_child(switch, self.workers)
        port = self._ports[switch.address]
        worker.say(switch_frames.FAN_IN, (self._job, child, port, group), self._nonce)
        if self._trial is not None:
            self._trial.invite(rank, time.monotonic())

    def trial_answered(self, rank: int, reached: bool) -> None:
        with self.lock:
            if self._trial is not None:
                self._trial.answered(rank, reached)

    def _try_group(self, now: float) -> None:
        """Test whether multicast reaches all participants. Then begin to send parameters, to the
        multicast group or to the root switch.
        """
        with self.lock:
            trying, group = self._trial, self._group
            if trying is None or group is None or not self._ports:
                return
            due, verdict = trying.due(now), trying.verdict(now)
            if verdict is not None:
                self._trial = None
                self._send_to(group if verdict else self._to_root)
        if verdict is None and due:
            packet = trial.packet_of(self._job, self._key)
            self._socket.send(packet, PACKET_NBYTES, group)
        if verdict is not None:
            by = f"the network (multicast to {group[0]})" if verdict else "the switches"
            self.host.report(f"fan-in: parameters are copied by {by}: {trying}")

    def _send_to(self, to: Address) -> None:
        """Begin to send parameters to the address `to`. The caller holds `lock`."""
        self._sender.to = to
        if self.over is None:
            self._sender.start()

    # packets, handled by the thread that receives them

    def _of_root(self, batch: Batch) -> Batch:
        """Select the packets that the root switch sent. Replayed packets may have a valid tag, but
        another sender.
        """
        ok = batch.ok & (batch.headers["sender"] == ROOT)
        self.refused += int(np.count_nonzero(batch.ok) - np.count_nonzero(ok))
        return replace(batch, ok=ok)

    def _take(self, batch: Batch) -> None:
        batch = self._of_root(batch)
        if not batch.ok.any():
            return
        whole = self._incoming.take(batch)
        self._clock.received(int(np.count_nonzero(batch.ok)))
        for run in whole:
            self._whole(run)

    def _whole(self, run: ExpectedRun) -> None:
        if run.kind is Kind.GRADIENT:
            self.post(fan_in.GradientArrived(run.chunk, run.round))
            return
        with self.lock:
            self._maxima[run.chunk, run.round] = run.maxima
        self.post(fan_in.ExponentsArrived(run.chunk, run.round))

    def _beats(self, batch: Batch) -> None:
        for beat, header, _ in beats_of(self._of_root(batch)):
            self._lateness.heartbeat(int(header["a"]), int(header["b"]), time.monotonic())
            self._outgoing.acknowledged(self._sender.heartbeat(beat))

    def _tick(self) -> None:
        now = time.monotonic()
        if self._ports and self._clock.due(now):
            beat = self._incoming.heartbeat()
            packet = beat_packet(self._key, self._job, Kind.GRADIENT_BEAT, beat)
            self._socket.send(packet, packet.size, self._to_root)
        if self._trial is not None:
            self._try_group(now)
        if now - self._checked >= CHECK_S:
            self._checked = now
            self._check(now)

    def _check(self, now: float) -> None:
        """Send the current time to the state machine, and report stragglers."""
        self._send_silent()
        if not self._chunks:
            return
        self.post(fan_in.Tick(now))
        with self.lock:
            late, left, apart = self.machine.late(), set(self.lost_ranks), self.machine.apart
            here = len(self.connections) == self.workers and bool(self._ports)
            lost = self._group_is_lost()
        if apart and not self._apart:
            self.host.report(
                "fan-in: workers waited for each other with gradients of different chunks, so a"
                " chunk was summed in two rounds: another run may round it differently"
            )
        self._apart = apart
        if lost:
            self.host.report(
                "fan-in: multicast stopped working, so the switches copy the parameters now"
            )
        for line in self._lateness.update(late, now, left, here):
            self.host.report(f"fan-in: {line}")

    def _send_silent(self) -> None:
        """Send each participant the names of the stragglers for which all wait, for its error
        messages.
        """
        absent = [
            f"switch {address}, which has not answered {since(for_s)}: {RESTART.format(address)}"
            for address, for_s in self._registration.absent.items()
        ]
        late = {} if absent else self._lateness.named
        for worker in self.everyone():
            others = [
                f"{self._lateness.name(rank)}, which {what}"
                for rank, what in late.items()
                if rank != worker.rank
            ]
            if absent or late or self._sent_silent:
                worker.say(m.PROGRESS, ("; ".join(absent or others), 0, m.WAITS_ONLY))
        self._sent_silent = bool(absent or late)

    def _group_is_lost(self) -> bool:
        """Return whether multicast has stopped working. If so, send parameters to the root switch
        from now on. The caller holds `lock`.
        """
        sender = self._sender
        if sender.to != self._group or not sender.machine.stuck:
            return False
        sender.to = self._to_root
        return True

    # actions of the state machine

    def _carry_out(self, action: Any) -> None:
        match action:
            case fan_in.Broadcast():
                self._broadcast(action)
            case fan_in.Grant():
                self._grant(action)
            case fan_in.SendMaxima():
                self._send_maxima(action)
            case fan_in.PushRound():
                self._push(action)
            case _:
                super()._carry_out(action)

    def _broadcast(self, action: fan_in.Broadcast) -> None:
        pull = action.pulls[0]
        nbytes = round_up(self._chunks[pull.chunk].weights_nbytes, PAGE)
        view = np.frombuffer(self._copies[action.buffer].view, np.uint8, nbytes)
        carried = OutgoingBytes(Kind.PARAMETERS, pull.chunk, pull.version, view)
        self._go_out(carried, lambda: self.post(messages.Done(action)))

    def _grant(self, action: fan_in.Grant) -> None:
        blocks = fixed_point.blocks_of(self._chunks[action.chunk].numel)
        self._incoming.expect_exponents(action.chunk, action.round, action.first, blocks)
        for worker in self.everyone():
            fields = action.chunk, action.round, action.first, worker.rank in action.announced
            worker.say(switch_frames.GRANT, fields)

    def _send_maxima(self, action: fan_in.SendMaxima) -> None:
        chunk, round = action.chunk, action.round
        maxima, numel = self._maxima.pop((chunk, round)), self._chunks[chunk].numel
        into = np.frombuffer(self._sums[action.buffer].view, np.float32, numel)
        self._incoming.expect_gradient(chunk, round, action.first, maxima, into)
        self._go_out(OutgoingBytes(Kind.MAXIMA, chunk, round, maxima, action.first))

    def _go_out(self, carried: OutgoingBytes, done: Callable[[], None] = lambda: None) -> None:
        self._sender.may_send(self._outgoing.add(carried, done))

    def _push(self, action: fan_in.PushRound) -> None:
        chunk, view = self._chunks[action.chunk], self._sums[action.buffer].view
        nbytes = 4 * chunk.numel
        if self._all == 1:  # the server expects the chunk's dtype from a single worker
            cast_in_place(view, chunk.numel, "fp32", chunk.dtype)
            nbytes = chunk.weights_nbytes
        whole = view[: round_up(nbytes, PAGE)]
        push = messages.Push(action.chunk, whole, action.fresh, False, next(self._tickets))
        self._send(push, lambda: self.post(messages.Done(action)))

    # status

    def status(self) -> m.Status:
        """Return the server's status, with this fan-in end's counters and the waits of each
        participant.
        """
        text, waits, stages, figures = self.server.status()
        now, waits = time.monotonic(), dict(waits)
        with self.lock:
            for rank, worker in self.connections.items():
                where = worker.link.peer.partition("(")[2].rpartition(":")[0]
                waits[f"worker {rank} ({where})"] = self._waits_for(rank, now)
        return f"{text}; {self._counters()}", waits, stages, figures

    def _waits_for(self, rank: int, now: float) -> tuple[float, str]:
        if not self._chunks:
            return 0.0, ""
        pulls = [waiting[rank][0][0] for waiting in self.machine.alone.values() if waiting[rank]]
        if not pulls:
            return 0.0, ""
        oldest = min(pulls, key=lambda pull: float(pull.into.since))
        return now - oldest.into.since, f"the others to request chunk {oldest.chunk}"

    def _counters(self) -> str:
        with self.lock:
            stuck = self.machine.stuck(STUCK_S) if self._chunks else 0
        numbers, received = self._sender.machine.numbers, self._incoming
        sent, resent = numbers.sent, numbers.resends
        return ", ".join(
            [
                f"fan-in of {self.workers} by {self.plan.root.address}: {sent:,} packets sent,"
                f" {resent:,} of them again ({100 * resent / max(sent, 1):.2f} % loss)",
                f"{received.packets:,} received, {received.repeated:,} of them again",
                f"{self._socket.drops:,} dropped by this host",
                f"{self._port.strangers:,} with a wrong tag, {self.refused:,} refused",
                f"{stuck} rounds stuck",
                *(f"switch {address} does not answer" for address in self._registration.absent),
                *(f"{self._lateness.name(r)} {what}" for r, what in self._lateness.named.items()),
            ]
        )

    # the end

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RoadtrainError):
            self.end(error)
        else:
            self.end(LostError(f"the fan-in end failed: {type(error).__name__}: {error}"))

    def ended(self, error: BaseException) -> None:
        """Send the error to the participants and end the server's session."""
        self.dismiss(error)
        self.threads.append(threading.Thread(target=self._close, name="close fan-in", daemon=True))
        self.threads[-1].start()
        self.server.end(error)

    def _close(self) -> None:
        """Close the UDP socket and the link to the server, after the session has ended."""
        self._sender.close()
        self._port.close()
        self._socket.close()
        if self._connected.is_set():
            self._up.close()
        self._registration.close()

    def tear_down(self, error: BaseException) -> None:
        """End this fan-in end, and release all memory. Called by a thread of the server, after the
        ServerSession.
        """
        self.end(error)
        self.wait_for_the_end(END_S)
        for buffer in [*self._sums, *(self._copies if self._chunks else [])]:
            buffer.close()
