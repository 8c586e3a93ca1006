"""SwitchHost: what `roadtrain serve --switch` runs. Several jobs at a time, each until its link
ends.

    TCP  PORT          a job's fan-in end: SwitchHello --> SwitchReady(port, slots); the status
    UDP  PORT+1 ...    one port for each job --> PacketLoop --> SwitchJob

A job's table is bounded by what it asked for and by the budget of this process (SlotQuota), its
socket is its own, so no job stops another. Nothing rests here: a switch that is started again has
an empty table, the jobs' ends come again by themselves, and what was lost is sent again. Assumes
that both sides know the token (the listener proves it). Does NOT know chunks or steps.
"""

from __future__ import annotations

import threading
from contextlib import suppress

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
    """Listens until it is closed. Raises ConfigError where the address cannot be had, or the
    memory holds no job.

    Invariant, under `_lock`: `_links` are the jobs that the packet loop has or is about to get;
    each has taken its slots from `quota`, which are given back when its socket is closed."""

    def __init__(
        self,
        address: Address,
        nbytes: int,
        options: TcpOptions,
        report: Report = print,
        device: TableDevice | None = None,
    ) -> None:
        """nbytes: of memory for all jobs. device: its owner's; it has the tables of jobs."""
        self.quota = SlotQuota(nbytes)
        self._token, self._report, self._device = options.token, report, device
        self._links: dict[bytes, _JobLink] = {}  # by nonce
        self._closing: list[threading.Thread] = []  # links of jobs that are over
        self._over: BaseException | None = None
        self._lock = threading.Condition()  # notified when it is over
        self._registering = threading.Lock()  # one job at a time
        self._loop = PacketLoop(self._job_ended, self._end)
        with undone_on_error(self._loop.close):
            self._listener = listen(address, self._accept, options, report, language=m.LANGUAGE)
        where = self._listener.address
        assert not isinstance(where, str), "a switch listens by TCP"
        self._host, self.port = where
        self.where = f"{self._host}:{self.port}"

    def _accept(self, link: Link, hello: bytes) -> Receiver:
        """Called by the listener for a link whose other side has proven the token."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        if not hello.startswith(switch_frames.SWITCH_GREETING):
            raise WireError(
                f"{self.where} is a switch: it sums and copies packets, and serves no parameters",
                hint="name it in the job's fan_in, and a `roadtrain serve --store` among the"
                " servers",
            )
        rest = hello[len(switch_frames.SWITCH_GREETING) :]
        said = checked(m.decoded(switch_frames.SWITCH_HELLO, rest, "no greeting of a fan-in end"))
        with self._registering:
            receiver = self._register(said, link)
        link.peer = f"job {said.session} ({link.peer})"
        link.send(
            switch_frames.SWITCH_READY, m.encode((receiver.job.socket.address[1], said.slots))
        )
        return receiver

    def _register(self, said: switch_frames.SwitchHello, link: Link) -> _JobLink:
        """A new job, or one that comes again since its link was lost and this side has not seen
        that yet. Raises ConfigError where the parent's host cannot be found."""
        with self._lock:
            earlier = self._links.get(said.nonce)
        if earlier is not None:
            self.leave(earlier, LostError("it has come again"), wait=True)
        self.quota.take(said.slots, said.children, said.session)
        socket = None
        try:
            taken = {job.socket.address[1]: job.name for job in self.jobs}
            where = self._host, self.port
            socket = job_socket(where, said, taken, self.quota, self._report)
            key = PacketKey.derive(self._token, said.nonce)
            parent = socket.number_of(said.parent)
            table = job_table(self._device, said, key, socket.address[1], parent, self._report)
            job = SwitchJob(said, parent, socket, table, key, self._report)
            with self._lock:
                if self._over is not None:
                    raise BusyError(f"the switch at {self.where} stops")
                receiver = self._links[said.nonce] = _JobLink(self, job, link)
        except BaseException:
            self.quota.give_back(said.slots, said.children)
            if socket is not None:
                socket.close()
            raise
        self._loop.add(job)
        self._report(
            f"job {job.name}: {said.slots} slots for {said.children} children, datagrams to port"
            f" {socket.address[1]}"
        )
        return receiver

    def leave(self, link: _JobLink, error: BaseException, wait: bool = False) -> None:
        """The job's link has ended: so does the job. `wait`: until its slots and port are free."""
        if self._forget(link, error):
            self._loop.remove(link.job, wait)

    def _job_ended(self, job: SwitchJob, error: BaseException | None) -> None:
        """From the packet loop: its socket is closed."""
        self.quota.give_back(job.hello.slots, job.hello.children)
        with self._lock:
            link = self._links.get(job.hello.nonce)
        if error is not None and link is not None and link.job is job:
            self._forget(link, error)

    def _forget(self, link: _JobLink, error: BaseException) -> bool:
        """Say why a job is over, here and to its end; in a thread, as this may be the link's own.
        Returns whether the job was not over before."""
        with self._lock:
            if self._links.get(link.job.hello.nonce) is not link:
                return False
            del self._links[link.job.hello.nonce]
            thread = threading.Thread(target=_closed, args=(link.link, error), name="close job")
            self._closing = [other for other in self._closing if other.is_alive()] + [thread]
            thread.start()
        self._report(f"job {link.job.name} is over: {_words(error)}".replace("\n", "; "))
        return True

    def status(self) -> m.Status:
        jobs, quota = self.jobs, self.quota
        rows = [
            f"{health.SWITCH}{len(jobs)} job(s), {quota.used_slots} slots in use,"
            f" {quota.free_slots} free; {show_bytes(quota.used_nbytes)} of"
            f" {show_bytes(quota.nbytes)}"
        ]
        return "\n".join(rows + [row for job in jobs for row in job.rows()]), {}, {}

    @property
    def jobs(self) -> list[SwitchJob]:
        with self._lock:
            return [link.job for link in self._links.values()]

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._over = self._over or error
            self._lock.notify_all()

    def run(self) -> None:
        """Until `stop`; raises what ended the packet loop, if that failed."""
        with self._lock:
            while self._over is None:
                self._lock.wait(1.0)
        if not isinstance(self._over, LostError):
            raise self._over

    def stop(self) -> None:
        self._end(LostError("the switch stops"))

    def __enter__(self) -> SwitchHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._listener.close()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            _closed(link.link, LostError("the switch stops"))
        self._loop.close()
        for thread in self._closing:
            thread.join(END_S)


class _JobLink:
    """The Receiver of a job's link: all that it says, it said in its greeting."""

    def __init__(self, host: SwitchHost, job: SwitchJob, link: Link) -> None:
        self.host, self.job, self.link = host, job, link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        raise WireError(f"a frame of kind {kind} with {nbytes} bytes came to a switch")

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        raise WireError(f"a frame of kind {kind} came to a switch")

    def lost(self, error: PeerError) -> None:
        self.host.leave(self, error)


def _closed(link: Link, error: BaseException) -> None:
    """Tell a job's end why, and close."""
    known = error if isinstance(error, RoadtrainError) else LostError(_words(error))
    with suppress(PeerError):
        link.send(m.FAILED, m.encode((type(known).__name__, str(known))), urgent=True)
    link.close()


def _words(error: BaseException) -> str:
    known = isinstance(error, RoadtrainError)
    return str(error) if known else f"this switch failed: {type(error).__name__}: {error}"
