"""Registration of a job at all switches of its tree, by the job's fan-in end.

    Registration --TCP--> root, then the switches below: SwitchHello --> SwitchReady(port, slots)

The links stay open, because a switch forgets a job when the job's link ends. After the loss of a
switch, the fan-in end registers there again and asks for the same port. Every wait has a deadline
(Rule 5).
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

SWITCH_S = 60.0  # timeout to register at a switch, the first time or again
BUSY_S = 10.0  # timeout if the switch is full: an earlier job may be about to leave
RETRY_S = 0.2  # interval between two attempts
ANSWER_S = 10.0  # timeout for the answer of a switch
RESTART = "run `roadtrain serve {} --switch` there"


@dataclass(frozen=True)
class JobTree:
    """A job and its tree of switches."""

    plan: FanIn
    participants: int
    session: str  # shown to users
    job: int
    nonce: bytes
    root_parent: Address  # UDP address of the fan-in end, to which the root sends

    def hello(self, node: SwitchNode, port: int, ready: dict[str, int]) -> bytes:
        """Encode the greeting to the switch `node`.

        Args:
            port: The UDP port that the job had at this switch before the switch was lost, else 0.
            ready: UDP ports of the switches above this switch, by address.
        """
        parent, child = self.root_parent, ROOT
        if node.parent:
            parent = address_of(node.parent)[0], ready[node.parent]
            above = next(n for n in self.plan.switches if n.address == node.parent)
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
    """The job's link to one switch, and the Receiver of the link."""

    def __init__(self, name: str, lost: Callable[[SwitchLink], None]) -> None:
        self.name, self._lost = name, lost  # name: the switch's address
        self.link: Link
        self._answer = queue.SimpleQueue[switch_frames.SwitchReadyHeader | PeerError]()
        self.error: PeerError | None = None  # why the link has ended
        self.ended = 0.0  # time of `error`

    def ready(self) -> switch_frames.SwitchReadyHeader:
        """Wait for the switch's answer. Raises DeadlineError after 10 s, or the error that the
        switch has sent.
        """
        try:
            answer = self._answer.get(timeout=ANSWER_S)
        except queue.Empty:
            raise DeadlineError(f"switch {self.name} did not answer in {ANSWER_S:.0f} s") from None
        if isinstance(answer, PeerError):
            raise answer
        return answer

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"switch {self.name} sent frame {kind} with {nbytes} payload bytes, not 0")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        fields: Any = m.header(kind, header)
        if kind == switch_frames.SWITCH_READY:
            self._answer.put(fields)
        elif kind == m.FAILED:
            self.lost(LostError(f"switch {self.name} ended the job: {fields[1]}"))
        else:
            raise WireError(f"a switch sent an unexpected frame of kind {kind}")

    def lost(self, error: PeerError) -> None:
        if self.error is None:
            self.ended, self.error = time.monotonic(), error
            self._answer.put(error)
            self._lost(self)


class Registration:
    """Keeps a job registered at all switches of its tree, in a thread.

    Args:
        ready: Called once, when all switches have accepted the job, with a dict: address of each
            switch -> UDP port of the job at this switch.
        failed: Called with the error if a switch cannot be reached in time.
    """

    def __init__(
        self,
        tree: JobTree,
        options: TcpOptions,
        *,
        ready: Callable[[dict[str, int]], None],
        failed: Callable[[BaseException], None],
        report: Callable[[str], None],
    ) -> None:
        self.tree, self._ready, self._failed, self._report = tree, ready, failed, report
        self._options = replace(options, connections=1, retry_s=0.0)
        self.ports: dict[str, int] = {}  # address -> UDP port; kept when a switch is lost
        self._links: dict[str, SwitchLink] = {}  # by address
        self._lost: queue.SimpleQueue[SwitchLink | None] = queue.SimpleQueue()  # None: end
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="register at switches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Close all links, so that the switches forget the job. Idempotent."""
        self._over.set()
        self._lost.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def absent(self) -> dict[str, float]:
        """The switches that do not answer: address -> seconds without an answer. Switches below one
        that has never answered are not listed.
        """
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
                self._reregister(lost)
        except BaseException as error:
            if not self._over.is_set():
                self._failed(error)
        finally:
            for link in self._links.values():
                link.link.close()

    def _reregister(self, lost: SwitchLink) -> None:
        node = next(node for node in self.tree.plan.switches if node.address == lost.name)
        if self._over.is_set() or self._links.get(lost.name) is not lost:
            return
        lost.link.close()
        self._report(f"fan-in: switch {lost.name} is lost: {_line(lost.error)}; reconnecting")
        self._register(node)
        if not self._over.is_set():
            self._report(f"fan-in: switch {lost.name} is connected again")

    def _register(self, node: SwitchNode) -> None:
        """Register at a switch, with retries until the deadline. Raises PeerError if that fails."""
        begin = time.monotonic()
        while not self._over.is_set():
            try:
                self._ask(node)
                return
            except (LostError, DeadlineError, BusyError) as error:
                limit_s = BUSY_S if isinstance(error, BusyError) else SWITCH_S
                if (for_s := time.monotonic() - begin) >= limit_s:
                    raise DeadlineError(
                        f"switch {node.address} did not accept job {self.tree.session}"
                        f" {since(for_s)}: {_line(error)}",
                        hint=f"{RESTART.format(node.address)} with enough --memory, or remove the"
                        " switch from fan_in; then start the job again: it resumes at the last"
                        " committed step",
                    ) from error
            self._over.wait(RETRY_S)

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
            answer = receiver.ready()
            if answer.slots < self.tree.plan.window or answer.port != (port or answer.port):
                raise WireError(
                    f"switch {node.address} gave {answer.slots} slots at port {answer.port}, but"
                    f" the job needs {self.tree.plan.window} slots at port {port or '(any)'}"
                )
        self.ports[node.address] = answer.port
        self._links[node.address] = receiver


def _line(error: BaseException | None) -> str:
    return str(error).replace("\n", "; ")
