"""The server behind `roadtrain serve --switch`. It serves several jobs at a time, each until the
job's link ends.

    TCP  PORT          a job's fan-in end: SwitchHello --> SwitchReady(port, slots); status requests
    UDP  PORT+1 ...    one port for each job --> PacketLoop --> SwitchJob

No state survives a restart: the jobs reconnect, and lost packets are sent again.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

from roadtrain.errors import BusyError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.retry import undone_on_error
from roadtrain.servers import frames as m
from roadtrain.servers import health
from roadtrain.switch import switch_frames
from roadtrain.switch.admission import SlotQuota, checked, job_socket, job_table
from roadtrain.switch.packet_loop import END_S, PacketLoop
from roadtrain.switch.packets import PacketKey
from roadtrain.switch.switch_job import SwitchJob
from roadtrain.switch.switch_table import TableDevice
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.listener import Report
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import show_bytes


class SwitchHost:
    """A running switch, which listens until the `with` statement ends.

    Raises ConfigError if it cannot listen at the address, or if the memory is too small for the
    smallest job.
    """

    def __init__(
        self,
        address: Address,
        nbytes: int,
        options: TcpOptions,
        report: Report = print,
        device: TableDevice | None = None,
    ) -> None:
        """
        Args:
            nbytes: Memory for all jobs.
            device: Network device in which the tables of jobs are made. The caller closes the
                device.
        """
        self.quota = SlotQuota(nbytes)
        self._token, self._report, self._device = options.token, report, device
        self._links: dict[bytes, _JobLink] = {}  # by nonce
        self._closing: list[threading.Thread] = []  # closing the links of jobs that have ended
        self._over: BaseException | None = None
        # guards `_links`; notified when `_over` is set
        self._lock = threading.Condition()
        self._registering = threading.Lock()  # jobs are registered one at a time
        self._loop = PacketLoop(self._job_ended, self._end)
        with undone_on_error(self._loop.close):
            self._listener = listen(address, self._accept, options, report, language=m.LANGUAGE)
        where = self._listener.address
        assert not isinstance(where, str), "a switch listens by TCP"
        self._host, self.port = where
        self.where = f"{self._host}:{self.port}"

    def _accept(self, link: Link, hello: bytes) -> Receiver:
        """Accept an authenticated link from a job, or answer a status request."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        if not hello.startswith(switch_frames.SWITCH_GREETING):
            raise WireError(
                f"{self.where} is a switch: it sums and copies packets, and serves no parameters",
                hint="list it in the job's fan_in; the server must be a `roadtrain serve --store`",
            )
        rest = hello[len(switch_frames.SWITCH_GREETING) :]
        request = m.decoded(switch_frames.SWITCH_HELLO, rest, "invalid greeting of a fan-in end")
        request = checked(request)
        with self._registering:
            receiver = self._register(request, link)
        link.peer = f"job {request.session} ({link.peer})"
        port = receiver.job.socket.address[1]
        link.send(switch_frames.SWITCH_READY, m.encode((port, request.slots)))
        return receiver

    def _register(self, hello: switch_frames.SwitchHello, link: Link) -> _JobLink:
        """Admit a job, and end its old link if it reconnects. Raises ConfigError if the parent's
        host name does not resolve.
        """
        with self._lock:
            earlier = self._links.get(hello.nonce)
        if earlier is not None:
            self.leave(earlier, LostError("the job has reconnected"), wait=True)
        self.quota.take(hello.slots, hello.children, hello.session)
        with ExitStack() as undo:
            undo.callback(self.quota.give_back, hello.slots, hello.children)
            used = {job.socket.address[1]: job.name for job in self.jobs}
            where = self._host, self.port
            socket = job_socket(where, hello, used, self.quota, self._report)
            undo.callback(socket.close)
            key = PacketKey.derive(self._token, hello.nonce)
            parent = socket.number_of(hello.parent)
            table = job_table(self._device, hello, key, socket.address[1], parent, self._report)
            job = SwitchJob(hello, parent, socket, table, key, self._report)
            with self._lock:
                if self._over is not None:
                    raise BusyError(f"the switch at {self.where} is stopping")
                receiver = self._links[hello.nonce] = _JobLink(self, job, link)
            undo.pop_all()
        self._loop.add(job)
        self._report(
            f"job {job.name}: {hello.slots} slots for {hello.children} children, datagrams to port"
            f" {socket.address[1]}"
        )
        return receiver

    def leave(self, link: _JobLink, error: BaseException, wait: bool = False) -> None:
        """End a job whose link has ended. If `wait`, block until its slots and its port are
        free.
        """
        if self._forget(link, error):
            self._loop.remove(link.job, wait)

    def _job_ended(self, job: SwitchJob, error: BaseException | None) -> None:
        """Give back the slots of a job whose socket was closed."""
        self.quota.give_back(job.hello.slots, job.hello.children)
        with self._lock:
            link = self._links.get(job.hello.nonce)
        if error is not None and link is not None and link.job is job:
            self._forget(link, error)

    def _forget(self, link: _JobLink, error: BaseException) -> bool:
        """Report to the user and to the job's fan-in end why the job has ended. Returns False if it
        had already ended.
        """
        with self._lock:
            if self._links.get(link.job.hello.nonce) is not link:
                return False
            del self._links[link.job.hello.nonce]
            thread = threading.Thread(target=_close, args=(link.link, error), name="close job")
            self._closing = [other for other in self._closing if other.is_alive()] + [thread]
            thread.start()
        self._report(f"job {link.job.name} has ended: {_message(error)}".replace("\n", "; "))
        return True

    def status(self) -> m.Status:
        jobs, quota = self.jobs, self.quota
        rows = [
            f"{health.SWITCH}{len(jobs)} job(s), {quota.used_slots} slots in use,"
            f" {quota.free_slots} free; {show_bytes(quota.used_nbytes)} of"
            f" {show_bytes(quota.nbytes)}"
        ]
        figures = m.Figures(
            workers=len(jobs), connected=len(jobs), nbytes=quota.used_nbytes, budget=quota.nbytes
        )
        return "\n".join(rows + [row for job in jobs for row in job.rows()]), {}, {}, figures

    @property
    def jobs(self) -> list[SwitchJob]:
        with self._lock:
            return [link.job for link in self._links.values()]

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._over = self._over or error
            self._lock.notify_all()

    def run(self) -> None:
        """Block until `stop` is called. Raises the error of the packet loop if the loop fails."""
        with self._lock:
            while self._over is None:
                self._lock.wait(1.0)
        if not isinstance(self._over, LostError):
            raise self._over

    def stop(self) -> None:
        self._end(LostError("the switch was stopped"))

    def __enter__(self) -> SwitchHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._listener.close()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            _close(link.link, LostError("the switch was stopped"))
        self._loop.close()
        for thread in self._closing:
            thread.join(END_S)


class _JobLink:
    """The Receiver of a job's link, on which no frame may arrive after the greeting."""

    def __init__(self, host: SwitchHost, job: SwitchJob, link: Link) -> None:
        self.host, self.job, self.link = host, job, link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"a switch received an unexpected frame of kind {kind}, {nbytes} bytes")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        raise WireError(f"a switch received an unexpected frame of kind {kind}")

    def lost(self, error: PeerError) -> None:
        self.host.leave(self, error)


def _close(link: Link, error: BaseException) -> None:
    sent = error if isinstance(error, RoadtrainError) else LostError(_message(error))
    with suppress(PeerError):
        link.send(m.FAILED, m.encode((type(sent).__name__, str(sent))), urgent=True)
    link.close()


def _message(error: BaseException) -> str:
    if isinstance(error, RoadtrainError):
        return str(error)
    return f"this switch failed: {type(error).__name__}: {error}"
