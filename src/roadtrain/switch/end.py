"""FanInEnd: where the sums of a job's switches arrive and parameters leave for all of its
participants, in the process of the server (Sun et al., LuWu, section 3). A participant is a worker,
or the relay of a host that stands for its workers.

    participants --TCP--> FanInEnd --local link--> ServerSession       all that is no bulk
    switches     ==UDP==> FanInEnd: exponents, sums                    Incoming
    switches     <==UDP== FanInEnd: parameters, maxima                 Outgoing

To the server all participants are one relay, which pushes sums in fp32; switch/protocol/fan_in.py
says what happens when. The switches are asked first (Registration); then each participant is told
how it takes part (FAN_IN). It and its ServerSession end together.

Threads: the links' own; one that sends packets; one that receives them, which also has the clock;
one that keeps the links to the switches. Does NOT decide, restart switches, or keep anything that a
restart needs.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from roadtrain.chunks import PAGE, Chunk
from roadtrain.device.buffers import Buffer
from roadtrain.errors import BusyError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.kernels.cast import cast_in_place
from roadtrain.servers import frames as m
from roadtrain.servers.intermediary import IntermediarySession
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.protocol import messages
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
from roadtrain.switch.protocol.chunk_queue import Announce
from roadtrain.switch.protocol.fan_in import (
    Broadcast,
    ExponentsCame,
    FanInStateMachine,
    GradientCame,
    Grant,
    PushRound,
    SendMaxima,
    Tick,
)
from roadtrain.switch.protocol.numbered import NOTHING
from roadtrain.switch.registration import RESTART, Registration, TreeOfJob
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

END_S = 10.0  # for its threads to end
UP_S = 60.0  # for the link inside this process
LOOK_S = 0.25  # between two looks at who is late
STUCK_S = 1.0  # after which a round that does not move is counted as stuck
DELAY_MS = 5  # that each participant waits longer than the one before it sends again


class FanInConnection(ParameterConnection):
    """A participant. Its gradients do not come by this link: they are announced."""

    session: FanInEnd

    def find_room(self, kind: int, fields: Any, nbytes: int) -> memoryview:
        if kind == m.PUSH:
            raise self._pushed()
        return super().find_room(kind, fields, nbytes)

    def take(self, kind: int, fields: Any, payload: memoryview) -> None:
        match kind:
            case switch_frames.ANNOUNCE:
                chunk = self.session.chunk(fields.chunk)
                if not chunk.trainable:
                    raise WireError(f"a gradient of chunk {chunk.id}, which is frozen")
                self.session.post(Announce(chunk.id, fields.fresh, self.rank))
            case switch_frames.HEARD:
                self.session.heard_trial(self.rank, fields.trial)
            case m.PUSH:
                raise self._pushed()
            case _:
                super().take(kind, fields, payload)

    def _pushed(self) -> WireError:
        return WireError(f"{self.link.peer} pushed a gradient that the network is to sum")


class FanInEnd(IntermediarySession):
    """Raises ConfigError for a plan that cannot be, LostError where no way leads to the root.

    Invariants, under `lock`: `_ports` are all or none; `_maxima` are those of rounds whose
    exponents have come and whose data is not granted."""

    name = "fan-in"
    connection_class = FanInConnection
    machine: FanInStateMachine  # once the layout is known

    def __init__(
        self, said: switch_frames.FanInHello, host: StoreHost, options: TcpOptions
    ) -> None:
        hello = said.hello
        super().__init__(hello.workers, stands_for=max(-hello.local, 1), deadline_s=UP_S)
        self.said, self.host, self.plan = said, host, plan_of(said)
        self._all = self.workers * self._stands_for  # workers of the job
        self._chunks: list[Chunk] = []
        self._sums: list[Buffer] = []  # for gradients, by their number
        self._tickets = itertools.count(1)  # of sums: the server knows a push's buffer by it
        self._maxima: dict[tuple[int, int], np.ndarray] = {}  # (chunk, round) -> uint8 [blocks]
        self._ports: dict[str, int] = {}  # of the switches, once all are ready
        self._lateness = Lateness(self.workers, self.plan.root.address)
        self._looked = time.monotonic()
        self._told_silent = False  # participants heard of somebody who does not answer
        self._apart = 0  # as the machine counts them, at the last look
        self._sender: PacketSender | None = None  # once it is known where to
        self._beat = NOTHING  # what was said before that
        self._job, self._nonce = secrets.randbits(32), secrets.token_bytes(16)
        self._key = PacketKey.derive(options.token, self._nonce)
        self._root = address_of(self.plan.root.address)
        home = own_address(self._root)
        window = self.plan.window * PACKET_NBYTES
        self._socket = DatagramSocket(
            (home, 0), receive_nbytes=2 * window, send_nbytes=SEND_NBYTES, report=host.report
        )
        self._to_root: Address = self._root  # with the port of this job, once that is known
        wanted = self.plan.multicast == "auto"
        self._group = trial.group_of(self._job, home) if wanted else None
        self._trial = trial.MulticastTrial(self.workers) if self._group else None
        self._incoming = Incoming(self.plan.window, self.plan.width, self.workers)
        self._outgoing = Outgoing(self._job, self._key)
        self._clock = BeatClock(self.plan.window)
        self.refused = 0  # packets with the job's tag that were not the root's
        self._port = PacketPort(
            [self._socket],
            self._key,
            self._job,
            {
                Kind.EXPONENTS: self._came,
                Kind.GRADIENT: self._came,
                Kind.PARAMETER_BEAT: self._beats,
            },
            self._failed,
            name=f"receive sums {hello.session}",
            tick=self._tick,
        )
        self._registration = Registration(
            TreeOfJob(
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

    # who is here

    @staticmethod
    def greeting(rest: bytes) -> switch_frames.FanInHello:
        """A participant's greeting. Raises WireError."""
        return m.decoded(switch_frames.FAN_IN_HELLO, rest, "no greeting of a fan-in")

    def is_of(self, hello: m.Hello) -> bool:
        """Whether that participant belongs to this start of the job."""
        ours = self.said.hello
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

    def accept(self, link: Link, said: switch_frames.FanInHello) -> ParameterConnection:
        """A participant comes; the first one opens the way to the server. Raises ForeignError
        where it means something else than the first."""
        check_same(self.said, said)
        with self.lock:
            worker = self.join(said.hello.rank, link)
            worker.signature = said.hello.signature
            if not self._connected.is_set():
                self._begin(said.hello)
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
            self._tell_fan_in(worker)

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        if all_gone or not self._chunks:
            self.end(error)
        else:
            self.post(messages.PeerLost(rank, str(error)))

    def chunk(self, number: int) -> Chunk:
        return self.server.chunk(number)

    # memory

    def _plan_memory(self, meta: StoreMeta, number: int, nbytes: int) -> int:
        """The layout is known: what this end takes of the server's `nbytes`."""
        budgets = derive_fan_in(meta.table, meta.owned(number), nbytes)
        total = budgets.total + self._socket.receive_nbytes + SEND_NBYTES  # those: the kernel's
        with self.lock:
            self._chunks = list(meta.table.chunks)
            self._copies = [Buffer(budgets.piece_bytes) for _ in range(budgets.buffers)]
            self._sums = [Buffer(budgets.scratch_bytes) for _ in range(budgets.buffers)]
            self.machine = FanInStateMachine(
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
                self._tell_fan_in(worker)
            if self._trial is None:
                self._send_to(self._to_root)
        self.host.report(
            f"fan-in: {len(ports)} switch(es) ready, the root {root}; a window of"
            f" {self.plan.window} packets"
        )

    def _tell_fan_in(self, worker: ParameterConnection) -> None:
        """How it takes part. Under `lock`."""
        rank, group = worker.rank, "" if self._trial is None else "{}:{}".format(*self._group or ())
        switch, child = self.plan.place_of(rank, self.workers)
        child += self.plan.first_child(switch, self.workers)
        port = self._ports[switch.address]
        worker.say(
            switch_frames.FAN_IN, (self._job, child, port, DELAY_MS * rank, group), self._nonce
        )
        if self._trial is not None:
            self._trial.told(rank, time.monotonic())

    def heard_trial(self, rank: int, came: bool) -> None:
        with self.lock:
            if self._trial is not None:
                self._trial.heard(rank, came)

    def _try_group(self, now: float) -> None:
        """While it is not known who copies."""
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
        """Parameters go there from now on. Under `lock`."""
        self._sender = sender = PacketSender(
            self._socket,
            to,
            self._outgoing.fill,
            self._failed,
            name=f"send parameters {self.said.hello.session}",
        )
        sender.may_send(self._outgoing.end)
        sender.heartbeat(self._beat)
        if self.over is None:
            sender.start()

    # packets, by the thread that receives them

    def _of_root(self, batch: Batch) -> Batch:
        """What the root has sent here. Others' packets have the right tag too: somebody who
        recorded one on its way to a switch may have sent it on."""
        ok = batch.ok & (batch.headers["sender"] == ROOT)
        self.refused += int(np.count_nonzero(batch.ok) - np.count_nonzero(ok))
        return replace(batch, ok=ok)

    def _came(self, batch: Batch) -> None:
        batch = self._of_root(batch)
        if not batch.ok.any():
            return
        whole = self._incoming.take(batch)
        self._clock.came(int(np.count_nonzero(batch.ok)))
        for run in whole:
            self._whole(run)

    def _whole(self, run: ExpectedRun) -> None:
        if run.kind is Kind.GRADIENT:
            self.post(GradientCame(run.chunk, run.round))
            return
        with self.lock:
            self._maxima[run.chunk, run.round] = run.maxima
        self.post(ExponentsCame(run.chunk, run.round))

    def _beats(self, batch: Batch) -> None:
        for beat, header, _ in beats_of(self._of_root(batch)):
            self._lateness.heard(int(header["a"]), int(header["b"]), time.monotonic())
            with self.lock:
                sender = self._sender
                if sender is None:
                    self._beat = beat if beat.ack == 0 else self._beat
                    continue
            self._outgoing.acknowledged(sender.heartbeat(beat))

    def _tick(self) -> None:
        now = time.monotonic()
        if self._ports and self._clock.due():
            beat = self._incoming.heartbeat()
            packet = beat_packet(self._key, self._job, Kind.GRADIENT_BEAT, beat)
            self._socket.send(packet, packet.size, self._to_root)
        if self._trial is not None:
            self._try_group(now)
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        """Time passes; who is late is named."""
        self._say_who_is_silent()
        if not self._chunks:
            return
        self.post(Tick(now))
        with self.lock:
            late, gone, apart = self.machine.late(), set(self.lost_ranks), self.machine.apart
            here = len(self.connections) == self.workers and bool(self._ports)
            lost = self._group_is_lost()
        if apart and not self._apart:
            self.host.report(
                "fan-in: workers waited for each other with gradients of different chunks, which"
                " were summed apart: another run rounds them otherwise"
            )
        self._apart = apart
        if lost:
            self.host.report(
                "fan-in: the network copies parameters no more: the switches do from now on"
            )
        for line in self._lateness.look(late, now, gone, here):
            self.host.report(f"fan-in: {line}")

    def _say_who_is_silent(self) -> None:
        """To each participant, for its errors: the switches, or the others, that it waits for."""
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
            if absent or late or self._told_silent:
                worker.say(m.PROGRESS, ("; ".join(absent or others), 0, m.WAITS_ONLY))
        self._told_silent = bool(absent or late)

    def _group_is_lost(self) -> bool:
        """Whether what goes to the group does not come any more, as where the network's devices
        forget who is in it. The root's copies come to all then. Under `lock`."""
        sender = self._sender
        if sender is None or sender.to != self._group or not sender.stuck:
            return False
        sender.to = self._to_root
        return True

    # what the state machine says

    def _carry_out(self, action: Any) -> None:
        match action:
            case Broadcast():
                self._broadcast(action)
            case Grant():
                self._grant(action)
            case SendMaxima():
                self._send_maxima(action)
            case PushRound():
                self._push(action)
            case _:
                super()._carry_out(action)

    def _broadcast(self, action: Broadcast) -> None:
        pull = action.pulls[0]
        nbytes = round_up(self._chunks[pull.chunk].weights_nbytes, PAGE)
        view = np.frombuffer(self._copies[action.buffer].view, np.uint8, nbytes)
        carried = OutgoingBytes(Kind.PARAMETERS, pull.chunk, pull.version, view)
        self._go_out(carried, lambda: self.post(messages.Done(action)))

    def _grant(self, action: Grant) -> None:
        blocks = fixed_point.blocks_of(self._chunks[action.chunk].numel)
        self._incoming.expect_exponents(action.chunk, action.round, action.first, blocks)
        for worker in self.everyone():
            fields = action.chunk, action.round, action.first, worker.rank in action.announced
            worker.say(switch_frames.GRANT, fields)

    def _send_maxima(self, action: SendMaxima) -> None:
        chunk, round = action.chunk, action.round
        maxima, numel = self._maxima.pop((chunk, round)), self._chunks[chunk].numel
        into = np.frombuffer(self._sums[action.buffer].view, np.float32, numel)
        self._incoming.expect_gradient(chunk, round, action.first, maxima, into)
        self._go_out(OutgoingBytes(Kind.MAXIMA, chunk, round, maxima, action.first))

    def _go_out(self, carried: OutgoingBytes, done: Callable[[], None] = lambda: None) -> None:
        below = self._outgoing.add(carried, done)
        if self._sender is not None:
            self._sender.may_send(below)

    def _push(self, action: PushRound) -> None:
        chunk, view = self._chunks[action.chunk], self._sums[action.buffer].view
        nbytes = 4 * chunk.numel
        if self._all == 1:  # the server has one worker, whose gradients have the chunk's dtype
            cast_in_place(view, chunk.numel, "fp32", chunk.dtype)
            nbytes = chunk.weights_nbytes
        whole = view[: round_up(nbytes, PAGE)]
        push = messages.Push(action.chunk, whole, action.fresh, False, next(self._tickets))
        self._send(push, lambda: self.post(messages.Done(action)))

    # for people

    def status(self) -> m.Status:
        """That of the server, and what the participants wait for."""
        text, waits, stages = self.server.status()
        now, waits = time.monotonic(), dict(waits)
        with self.lock:
            for rank, worker in self.connections.items():
                where = worker.link.peer.partition("(")[2].rpartition(":")[0]
                waits[f"worker {rank} ({where})"] = self._waits_for(rank, now)
        return f"{text}; {self._counters()}", waits, stages

    def _waits_for(self, rank: int, now: float) -> tuple[float, str]:
        if not self._chunks:
            return 0.0, ""
        pulls = [waiting[rank][0][0] for waiting in self.machine.alone.values() if waiting[rank]]
        if not pulls:
            return 0.0, ""
        oldest = min(pulls, key=lambda pull: float(pull.into.since))
        return now - oldest.into.since, f"the others to ask for chunk {oldest.chunk}"

    def _counters(self) -> str:
        with self.lock:
            sender = self._sender
            stuck = self.machine.stuck(STUCK_S) if self._chunks else 0
        sent, resent = (0, 0) if sender is None else (sender.machine.sent, sender.machine.again)
        came = self._incoming
        return ", ".join(
            [
                f"fan-in of {self.workers} by {self.plan.root.address}: {sent:,} packets sent,"
                f" {resent:,} of them again ({100 * resent / max(sent, 1):.2f} % loss)",
                f"{came.packets:,} came, {came.repeated:,} of them again",
                f"{self._socket.drops:,} dropped by this host",
                f"{self._port.strangers:,} of strangers, {self.refused:,} refused",
                f"{stuck} rounds stuck",
                *(f"switch {address} is not there" for address in self._registration.absent),
                *(f"{self._lateness.name(r)} {what}" for r, what in self._lateness.named.items()),
            ]
        )

    # the end

    def _failed(self, error: BaseException) -> None:
        """Of a thread of packets or of the links to switches."""
        if isinstance(error, RoadtrainError):
            self.end(error)
        else:
            self.end(LostError(f"the end of the fan-in failed: {type(error).__name__}: {error}"))

    def ended(self, error: BaseException) -> None:
        """Participants are told why; so does the session of the server end."""
        self.dismiss(error)
        self.threads.append(threading.Thread(target=self._close, name="close fan-in", daemon=True))
        self.threads[-1].start()
        self.server.end(error)

    def _close(self) -> None:
        """The packets' half, and the link to the server. `_send_to` starts nothing any more."""
        with self.lock:
            sender = self._sender
        if sender is not None:
            sender.close()
        self._port.close()
        self._socket.close()
        if self._connected.is_set():
            self._up.close()
        self._registration.close()

    def tear_down(self, error: BaseException) -> None:
        """From the host's own thread, once its ServerSession is torn down."""
        self.end(error)
        self.wait_for_the_end(END_S)
        for buffer in [*self._sums, *(self._copies if self._chunks else [])]:
            buffer.close()
