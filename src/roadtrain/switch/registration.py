"""Registration: a job's end asks every switch of its tree to sum and copy for it, the root first,
and keeps the links on which it asked. A switch that is lost is asked again, for the same port: the
others go on sending there. Switches forget a job when its link ends.

    Registration --TCP--> root, then those below it: SwitchHello --> SwitchReady(port, slots)

Every wait has a deadline (Rule 5). Does NOT send datagrams.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from roadtrain.errors import BusyError, DeadlineError, LostError, PeerError, WireError
from roadtrain.retry import undone_on_error
from roadtrain.servers import frames as m
from roadtrain.switch import switch_frames
from roadtrain.switch.lateness import since
from roadtrain.switch.options import FanIn, SwitchNode
from roadtrain.switch.packets import ROOT
from roadtrain.transport.address import address_of
from roadtrain.transport.link import Link
from roadtrain.transport.tcp import Address, TcpOptions, connect

SWITCH_S = 60.0  # for a switch to be there, also again
BUSY_S = 10.0  # for the job before, which may be leaving, to give its slots back
AGAIN_S = 0.2  # between two tries
ANSWER_S = 10.0  # for a switch to answer
RESTART = "run `roadtrain serve {} --switch` there"


@dataclass(frozen=True)
class TreeOfJob:
    """What switches are asked for."""

    plan: FanIn
    participants: int
    session: str  # for people
    job: int
    nonce: bytes
    root_parent: Address  # where datagrams of the root go: those of the job's end

    def hello(self, node: SwitchNode, port: int, ready: dict[str, int]) -> bytes:
        """`port`: that it had before, 0: none. `ready`: ports of the switches above it."""
        parent, child = self.root_parent, ROOT
        if node.parent:
            parent = address_of(node.parent)[0], ready[node.parent]
            above = next(one for one in self.plan.switches if one.address == node.parent)
            child = self.plan.below(above).index(node)
            child += self.plan.first_child(above, self.participants)
        children = self.plan.children(node, self.participants)
        return switch_frames.SWITCH_GREETING + m.encode(
            switch_frames.SwitchHello(
                self.session,
                self.job,
                self.nonce,
                children,
                self.plan.window,
                child,
                parent,
                port,
                self.plan.first_child(node, self.participants),
            )
        )


class SwitchLink:
    """The job's link to one switch: the Receiver of what it says."""

    def __init__(self, name: str, lost: Callable[[SwitchLink], None]) -> None:
        self.name, self._lost = name, lost  # its address
        self.link: Link
        self._answer: queue.SimpleQueue[switch_frames.SwitchReadyHeader | PeerError] = (
            queue.SimpleQueue()
        )
        self.error: PeerError | None = None  # why it has ended
        self.ended = 0.0  # and when

    def ready(self) -> switch_frames.SwitchReadyHeader:
        """What it answers. Raises DeadlineError, or what it says."""
        try:
            said = self._answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise DeadlineError(f"switch {self.name}: no answer for {ANSWER_S:.0f} s") from None
        if isinstance(said, PeerError):
            raise said
        return said

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"{nbytes} bytes came with a frame of kind {kind} from a switch")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields: Any = m.header(kind, header)
        if kind == switch_frames.SWITCH_READY:
            self._answer.put(fields)
        elif kind == m.FAILED:
            self.lost(LostError(f"switch {self.name} ended: {fields[1]}"))
        else:
            raise WireError(f"a frame of kind {kind} came from a switch")

    def lost(self, error: PeerError) -> None:
        if self.error is None:
            self.ended, self.error = time.monotonic(), error
            self._answer.put(error)
            self._lost(self)


class Registration:
    """A thread that keeps all switches of a tree. `ready` is called once, when all of them are
    there, with the port of each by its address; `failed` once, with why that cannot be."""

    def __init__(
        self,
        tree: TreeOfJob,
        options: TcpOptions,
        *,
        ready: Callable[[dict[str, int]], None],
        failed: Callable[[BaseException], None],
        report: Callable[[str], None],
    ) -> None:
        self.tree, self._ready, self._failed, self._report = tree, ready, failed, report
        self._options = replace(options, connections=1, retry_s=0.0)
        self.ports: dict[str, int] = {}  # of the switches that were there once
        self._links: dict[str, SwitchLink] = {}  # by address
        self._lost: queue.SimpleQueue[SwitchLink | None] = queue.SimpleQueue()  # None: the end
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="register at switches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Switches forget the job. Idempotent."""
        self._over.set()
        self._lost.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def absent(self) -> dict[str, float]:
        """Addresses of the switches that do not answer, each with the seconds since when. Those
        below a switch that was never there are not asked, and not named."""
        now, found = time.monotonic(), dict[str, float]()
        for node in self.tree.plan.from_root:
            link = self._links.get(node.address)
            if link is None:
                return {**found, node.address: now - self._begun}
            if link.error is not None:
                found[node.address] = now - link.ended
        return found

    def _work(self) -> None:
        try:
            for node in self.tree.plan.from_root:
                self._register(node)
            if not self._over.is_set():
                self._ready(dict(self.ports))
            while (lost := self._lost.get()) is not None:
                self._again(lost)
        except BaseException as error:
            if not self._over.is_set():
                self._failed(error)
        finally:
            for link in self._links.values():
                link.link.close()

    def _again(self, lost: SwitchLink) -> None:
        node = next(one for one in self.tree.plan.switches if one.address == lost.name)
        if self._over.is_set() or self._links.get(lost.name) is not lost:
            return
        lost.link.close()
        self._report(f"fan-in: switch {lost.name} is lost: {_line(lost.error)}; asks it again")
        self._register(node)
        if not self._over.is_set():
            self._report(f"fan-in: switch {lost.name} is there again")

    def _register(self, node: SwitchNode) -> None:
        """Until it is there, or the deadline has passed. Raises PeerError."""
        begin = time.monotonic()
        while not self._over.is_set():
            try:
                self._ask(node)
                return
            except (LostError, DeadlineError, BusyError) as error:
                limit_s = BUSY_S if isinstance(error, BusyError) else SWITCH_S
                if (for_s := time.monotonic() - begin) >= limit_s:
                    raise DeadlineError(
                        f"switch {node.address} did not take job {self.tree.session} within"
                        f" {for_s:.0f} s, {since(for_s)}: {_line(error)}",
                        hint=f"{RESTART.format(node.address)} with enough --memory, or leave the"
                        " switch out of fan_in; then start the job again: it goes on at the last"
                        " committed step",
                    ) from error
            self._over.wait(AGAIN_S)

    def _ask(self, node: SwitchNode) -> None:
        port = self.ports.get(node.address, 0)
        receiver = SwitchLink(node.address, self._lost.put)
        link = connect(
            address_of(node.address),
            receiver,
            self._options,
            hello=self.tree.hello(node, port, self.ports),
            name="switch",
            language=m.LANGUAGE,
        )
        receiver.link = link
        with undone_on_error(link.close):
            said = receiver.ready()
            if said.slots < self.tree.plan.window or said.port != (port or said.port):
                raise WireError(
                    f"switch {node.address} gave {said.slots} slots at port {said.port}, asked for"
                    f" were {self.tree.plan.window} at port {port or 'any'}"
                )
        self.ports[node.address] = said.port
        self._links[node.address] = receiver


def _line(error: BaseException | None) -> str:
    return str(error).replace("\n", "; ")
