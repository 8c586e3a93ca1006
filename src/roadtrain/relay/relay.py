"""A relay: a process that communicates with the servers for the workers of its host. Does NOT
import torch, and keeps no state that must survive a restart.

    worker --ring--+
    worker --ring--+-- relay --TCP-- every server        one link per server, for all workers

A ring is a queue in shared memory. The relay pulls parameters once for all workers and keeps as
many as its memory can hold. Gradients of several workers are summed (in fp32 and in worker order:
Rule 1), and only the sum is sent to the server. The state machine in relay/protocol/relay.py makes
all decisions.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from roadtrain.chunks import PAGE, Block, Chunk
from roadtrain.device.buffers import Buffer
from roadtrain.device.pool import BufferPool
from roadtrain.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    ForeignError,
    PeerError,
    WireError,
)
from roadtrain.relay.protocol.relay import PushSum, RelayStateMachine
from roadtrain.relay.route import END_S, Orders
from roadtrain.retry import retry
from roadtrain.servers import frames as m
from roadtrain.servers import routes
from roadtrain.servers.gradients import PushedGradients
from roadtrain.servers.intermediary import IntermediarySession
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.intermediary import Up
from roadtrain.servers.routes import OpenRoute
from roadtrain.transport import shm
from roadtrain.transport.address import local_options
from roadtrain.transport.link import Link
from roadtrain.transport.listener import Listener
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import round_up, show_bytes

# If a worker is silent for longer, the relay stops sending heartbeats to the server.
SILENT_S = 30.0


def main() -> None:
    orders = msgspec.json.decode(
        sys.stdin.buffer.read(), type=Orders, dec_hook=lambda kind, value: kind(value)
    )
    b, servers = orders.budgets, len(orders.ends.addresses)
    nbytes = (b.copies + orders.local * b.pool) * b.piece_bytes + (
        2 * b.scratch_bytes if orders.local > 1 else 0
    )
    print(
        f"relay of host {orders.ends.group.rank}: {orders.local} worker(s), {servers} server(s), "
        f"{show_bytes(servers * nbytes)} of buffers",
        flush=True,
    )
    run(orders)


def run(orders: Orders) -> None:
    """Run the relay until every worker has left. Raises DeadlineError if no worker connects in
    time."""
    ends, over = orders.ends, threading.Semaphore(0)
    route = routes.from_json(*orders.onward).open(ends)
    directory = Path(orders.directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    lanes = [
        ServerChannel(orders, number, route, over.release) for number in range(len(ends.addresses))
    ]
    listeners = []
    try:
        for lane in lanes:
            listeners.append(_listen(directory / str(lane.number), lane, ends.options))
        for lane in lanes:
            try:
                lane.dial()
            except PeerError as error:
                lane.end(error)
        for _ in lanes:
            while not over.acquire(timeout=ends.deadline_s):
                if not all(lane.connections for lane in lanes):
                    raise DeadlineError(
                        f"no worker connected to the relay of host {ends.group.rank} within "
                        f"{ends.deadline_s:.0f} s"
                    )
    finally:
        for listener in listeners:
            listener.close()
        for lane in lanes:
            lane.end(DeadlineError("the relay ends"))
            lane.wait_for_the_end(END_S)
        with suppress(OSError):
            directory.rmdir()


def _listen(path: Path, lane: ServerChannel, options: TcpOptions) -> Listener:
    """Listen on the socket `path`, once the relay of an earlier start of the job has released
    it."""
    near = local_options(options)
    return retry(
        lambda: shm.listen(path, lane.accept, near, language=m.LANGUAGE), ConfigError, 10.0
    )


class ServerChannel(IntermediarySession):
    """The traffic between the workers of this host and one server: the session of these workers,
    and the handler of the frames from the server. The workers of the host are numbered from 0."""

    machine: RelayStateMachine

    def __init__(
        self, orders: Orders, number: int, route: OpenRoute, finished: Callable[[], None]
    ) -> None:
        super().__init__(orders.local, deadline_s=orders.ends.deadline_s)
        budgets, meta = orders.budgets, orders.ends.meta
        self.orders, self.number, self._finished = orders, number, finished
        self._route = route
        self._signature, self.table = meta.signature, meta.table
        self._tickets = itertools.count(1)  # tickets of pushed sums
        self.machine = RelayStateMachine(orders.local, budgets.copies)
        self._copies = [Buffer(budgets.piece_bytes) for _ in range(budgets.copies)]
        # (chunk, worker) -> tickets of the worker's pushes whose buffers are still in use
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._grads: Any = None  # PushedGradients, with several workers
        if orders.local > 1:
            trainable = {c.id: c for c in meta.table.trainable}
            self._grads = PushedGradients(trainable, None, 2, budgets.scratch_bytes, orders.local)

    def dial(self) -> None:
        """Connect the relay to the server, which treats the relay as a worker whose rank is the
        number of the host. Raises PeerError if the link cannot be opened."""
        ends, local = self.orders.ends, self.orders.local
        group, summed = ends.group, 1 if local == 1 else -local
        hello = m.Hello(
            group.session, group.rank, group.workers, summed, self.number, self._signature
        )
        report = partial(print, flush=True)
        self._up = retry(
            lambda: self._route.connect(self.number, self, ends.options, hello, report),
            BusyError,
            ends.options.retry_s,
        )
        self._connected.set()

    # workers

    def accept(self, link: Link, hello: bytes) -> ParameterConnection:
        caller = m.decoded(m.HELLO, hello, "not the greeting of a worker")
        host, local = self.orders.ends.group, self.orders.local
        index = caller.rank - host.rank * local
        with self.lock:
            if caller.session != host.session:
                raise self.busy()
            if not 0 <= index < local:
                raise WireError(
                    f"worker {caller.rank} is not one of the {local} worker(s) of host {host.rank}"
                )
            if caller.signature != self._signature:
                raise ForeignError(
                    f"worker {caller.rank} has another model, dtype, chunk size or optimizer than"
                    " the first worker of the same host",
                    hint="run the same job on every worker",
                )
            return self.join(index, link)

    def name_of(self, rank: int) -> str:
        return super().name_of(self.orders.ends.group.rank * self.orders.local + rank)

    def prepare(self, worker: ParameterConnection) -> None:
        worker.pool = BufferPool(self.orders.budgets.pool, self.orders.budgets.piece_bytes)

    def one_left(self, rank: int, error: PeerError, all_gone: bool) -> None:
        if all_gone:
            self.end(error)
        else:
            self.post(messages.PeerLost(rank, str(error)))

    def ended(self, error: BaseException) -> None:
        """Tell the remaining workers why the session has ended. The server only sees a lost
        connection."""
        self.dismiss(error)
        if self._connected.is_set():
            self._up.close()
        self._finished()

    # requests of the workers

    @property
    def blocks(self) -> Sequence[Block]:
        return self.table.blocks

    def chunk(self, number: int) -> Chunk:
        chunks = self.table.chunks
        if not 0 <= number < len(chunks):
            raise WireError(f"chunk {number} was requested, the last is {len(chunks) - 1}")
        return chunks[number]

    def beat(self) -> None:
        """Forward a heartbeat to the server, but only while no worker of the host is silent."""
        if not any(worker.silent_for(SILENT_S) for worker in self.everyone()):
            super().beat()

    # actions of the state machine

    def _carry_out(self, action: Any) -> None:
        match action:
            case Up(messages.Push() as push):
                pusher = self.connections[push.worker]
                self._send(push, lambda: pusher.freed(push.ticket))
            case messages.Hold(push):
                _, kept = self._grads.hold(push)
                if kept:
                    self._kept.setdefault((push.chunk, push.worker), []).append(push.ticket)
                else:
                    self.connections[push.worker].freed(push.ticket)
            case messages.Discard(chunk, worker):
                assert worker is not None  # only a server discards the gradients of all workers
                self._grads.discard(chunk, worker)
                self._free(chunk, worker)
            case PushSum(chunk):
                self._push_sum(chunk)
            case _:
                super()._carry_out(action)

    def _push_sum(self, number: int) -> None:
        grads = self._grads
        if not grads.holds(number):
            return
        scratch, _, _ = grads.take(number)
        for worker in self.connections:
            self._free(number, worker)
        whole = scratch.view[: round_up(4 * self.table.chunks[number].numel, PAGE)]
        self._send(
            messages.Push(number, whole, True, False, next(self._tickets)),
            lambda: grads.done(scratch),
        )

    def _free(self, chunk: int, worker: int) -> None:
        for ticket in self._kept.pop((chunk, worker), ()):
            self.connections[worker].freed(ticket)


if __name__ == "__main__":
    main()
