"""SessionHost: what `roadtrain serve` runs. One storage directory, one session of workers at a
time, one Server beside it.

    listening -> a worker joins -> ServerSession -> the workers leave, or one is lost -> listening

Workers beat: one whose process has stopped ends the session after SILENT_S. A worker that is lost
ends the session: what was not committed is dropped, the others are told, and the next session
begins at the last committed step (Rule 3). So does this process when it is started again with the
same directory.

Assumes: all workers of a session run the same job (checked). Does NOT restart workers: torchrun
does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from roadtrain.errors import ConfigError, ForeignError, LostError, RoadtrainError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers import health, routes
from roadtrain.servers.connection import MOST_WORKERS
from roadtrain.servers.hosted_store import HostedStore
from roadtrain.servers.routes import RouteEnd
from roadtrain.servers.server_session import ServerSession
from roadtrain.storage.direct import check_directory
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.plugins import link_options, load, plugin_names
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import parse_bytes, show_bytes

Report = Callable[[str], None]
# after which a worker that does not beat is taken for stopped, and the session ends
SILENT_S = 60.0
LOOK_S = 1.0  # between two looks at the session
EVERY = 100  # steps between two snapshots
# What else `roadtrain serve` serves: functions of the address, the memory as the user wrote it (or
# None), the options of links, and an option of their own.
ROLES = "roadtrain.roles"


def command(
    address: str,
    store: str | None = None,
    budget: str | None = None,
    token_file: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    ca: str | None = None,
    snapshot: str | None = None,
    snapshot_every: int | None = None,
    sum: bool = False,
    formats: str | None = None,
    client_ca: str | None = None,
    link: str = "tcp",
    switch: bool = False,
    memory: str | None = None,
    xdp: str | None = None,
) -> int:
    """Serve parameters and optimizer state to workers (servers.addresses of their job). The same
    command resumes.

    `roadtrain serve HOST:PORT --store DIR`, or `--sum`, or `--switch`.

    Args:
        store: directory that the state rests in; one in /dev/shm rests in memory
        sum: instead: add up gradients for workers that keep their state (roadtrain.Summation)
        formats: with --sum: a module to import that registers formats of your own
        budget: bytes of memory for buffers, as 4GiB (half of what is free)
        snapshot: directory on files that a state in memory is copied to while training goes on
        snapshot_every: steps between two snapshots (100); the same at all servers of a job
        token_file: file (mode 600) with the token that workers must know; needed beyond this host
        cert: TLS: PEM file of this server's certificate
        key: TLS: PEM file of its key
        client_ca: TLS: PEM file that workers' certificates must be signed by (else they need none)
        ca: the older name of --client-ca
        link: tcp, or the name of a plugin's link, as rdma; the workers' too (tcp)
        switch: instead: sum the packets of jobs with a fan_in and copy their parameters; datagrams
            come to the 64 UDP ports above PORT
        memory: with --switch: bytes for the tables and sockets of all jobs (256MiB)
        xdp: with --switch: sum in the kernel what comes to this network device, as eth0 (user space
            sums where that cannot be, and says why)
    """
    where = address_of(address)
    kept = {"--store": store, "--snapshot": snapshot, "--snapshot-every": snapshot_every}
    of_servers = {**kept, "--sum": sum, "--formats": formats, "--budget": budget}
    _check_switch(
        switch, {"--memory": memory, "--xdp": xdp}, {**of_servers, f"--link {link}": link != "tcp"}
    )
    if not switch:
        _check_server(store, sum, formats, snapshot, snapshot_every)
    if ca and client_ca:
        raise ConfigError(
            f"--ca {ca} and --client-ca {client_ca}",
            hint="--ca is the older name: --client-ca alone",
        )
    tls = tls_of(cert, key, client_ca or ca)
    if tls is not None and cert is None:
        raise ConfigError("TLS: a server needs --cert and --key")
    options = link_options(link)(token=token_of(token_file), tls=tls)
    if switch:
        return load(ROLES, "switch")(where, memory, options, xdp)
    if store is None:
        return load(ROLES, "sum")(where, budget, options, formats)
    nbytes = budget_of(budget)
    every = 0 if snapshot is None else snapshot_every or EVERY
    for directory in filter(None, (store, snapshot)):
        check_directory(Path(directory))
    with SessionHost(
        where,
        Path(store),
        nbytes,
        options,
        snapshot=Path(snapshot or ""),
        every=every,
    ) as host:
        print(
            f"serving {store} at {host.where}, at most {show_bytes(nbytes)}; the state rests"
            f" {host.store.rests}"
        )
        host.run()
    return 0


def budget_of(text: str | None) -> int:
    """Bytes of --budget; half of what is free where it is not given."""
    return parse_bytes(text) if text is not None else psutil.virtual_memory().available // 2


def _check_switch(
    switch: bool, of_switches: Mapping[str, str | None], of_servers: Mapping[str, object]
) -> None:
    """Raises ConfigError for what a switch, or a server, does not do."""
    given = [name for name, value in of_servers.items() if value is not None and value is not False]
    if switch and given:
        raise ConfigError(
            f"--switch with {', '.join(given)}",
            hint="a switch keeps nothing, its memory is --memory: servers that store, or sum with"
            " --sum, are commands of their own",
        )
    given = [f"{name} {value}" for name, value in of_switches.items() if value is not None]
    if given and not switch:
        raise ConfigError(
            f"{', '.join(given)} without --switch", hint="a server's memory is --budget"
        )


def _check_server(
    store: str | None,
    sum: bool,
    formats: str | None,
    snapshot: str | None,
    snapshot_every: int | None,
) -> None:
    """Raises ConfigError for options that contradict each other."""
    if (store is None) != sum:
        raise ConfigError(
            f"--store {store} and --sum: a server does one of them"
            if sum
            else "what is to be served? Neither --store nor --sum is given",
            hint=(
                "--store names a directory on the device that the state shall rest on (one in"
                " /dev/shm rests in memory and outlives this process, not the machine); --sum keeps"
                " no state"
            ),
        )
    if sum and snapshot is not None:
        raise ConfigError(
            f"--sum and --snapshot {snapshot}: --sum keeps no state", hint="leave --snapshot out"
        )
    if formats is not None and not sum:
        raise ConfigError(f"--formats {formats} without --sum", hint="leave --formats out")
    twice = snapshot is not None and snapshot == store
    if twice or (snapshot_every is not None and (snapshot is None or snapshot_every < 1)):
        given = {"--snapshot": snapshot, "--snapshot-every": snapshot_every, "--store": store}
        raise ConfigError(
            ", ".join(f"{name} {value}" for name, value in given.items() if value is not None),
            hint=(
                "--snapshot names a directory of its own on files, --snapshot-every steps, 1 or"
                " more"
            ),
        )


class SessionHost:
    """Listens; one session at a time. `run` returns after `stop`."""

    def __init__(
        self,
        address: Address,
        directory: Path,
        nbytes: int,
        options: TcpOptions,
        report: Report = print,
        snapshot: Path = Path(),
        every: int = 0,
        silent_s: float = SILENT_S,
    ) -> None:
        self.store = HostedStore(directory, snapshot, every)
        self.nbytes, self.report = nbytes, report
        self.silent_s = silent_s  # how long a worker may be silent
        self.session: ServerSession | None = None
        self.front: RouteEnd | None = None  # before `session`, if workers come by a route with one
        self._options = options
        self._ended: queue.SimpleQueue[tuple[ServerSession, BaseException] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()  # over making a session
        self._listener = listen(address, self._accept, options, report, language=m.LANGUAGE)
        self.where = "{}:{}".format(*self._listener.address)

    def _accept(self, link: Link, hello: bytes) -> Receiver:
        """Called by the listener for a link whose other side has proven the token."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        if hello.startswith(m.WITHOUT):
            rest = m.decoded(m.WITHOUT_REST, hello[len(m.WITHOUT) :], "no word of a witness")
            done = self._go_on_without(rest)
            return health.answer(link, ("noted" if done else "not the last session here", {}, {}))
        if (by_route := routes.named_in(hello)) is not None:
            return self._accept_by_route(link, *by_route)
        said = _checked(m.decoded(m.HELLO, hello, "no greeting of a worker"))
        with self._lock:
            session = self.session
            if session is None:
                session = self.session = ServerSession(said, self)
            elif self.front is not None:
                name = self.front.name
                raise self._not_alike(said, name, "worker {} has no {}, the others have one")
            elif not session.is_of(said):
                raise session.busy()
            return session.admit(said.rank, link, said.signature)

    def _accept_by_route(self, link: Link, name: str, rest: bytes) -> Receiver:
        """A participant whose route has an end here. The first one begins the session."""
        end_class = routes.load(name).end if name in plugin_names(routes.GROUP) else None
        if end_class is None:
            raise WireError(
                f"{self.where} is a server, no {name}: it keeps a store",
                hint="give it as one of the job's servers, and to nothing else",
            )
        greeting = end_class.greeting(rest)
        hello = _checked(greeting.hello)
        with self._lock:
            if self.session is None:
                self.front = end_class(greeting, self, self._options)
                self.session = self.front.server
            elif not isinstance(self.front, end_class):
                raise self._not_alike(hello, name, "worker {} has a {}, the others have none")
            elif not self.front.is_of(hello):
                raise self.front.busy()
            return self.front.accept(link, greeting)

    def _not_alike(self, hello: m.Hello, route: str, words: str) -> RoadtrainError:
        """Why a worker cannot join a session whose workers come by another route."""
        assert self.session is not None
        if hello.session != self.session.name:
            return self.session.busy()
        option = route.replace("-", "_")
        return ForeignError(
            words.format(hello.rank, option), hint=f"every worker has the same {option}"
        )

    def status(self) -> m.Status:
        doing: m.Status = "no session: waits for workers", {}, {}
        if (session := self.front or self.session) is not None:
            doing = session.status()
        return f"state {self.store.rests}; {doing[0]}", *doing[1:]

    def _go_on_without(self, said: m.Without) -> bool:
        opened = None if self.session is None else self.session.tier
        meta = self.store.go_on_without(*said, opened)
        if meta is None:
            return False
        others = ", ".join(map(str, said.servers))
        self.report(f"server {meta.index}: may go on without server(s) {others}")
        return True

    def session_ended(self, session: ServerSession, error: BaseException) -> None:
        self._ended.put((session, error))

    def run(self) -> None:
        """Ends sessions, one after the other, until `stop`. After this process stood still itself
        it does not look at once: its links first read what came meanwhile."""
        while True:
            begun = time.monotonic()
            try:
                over = self._ended.get(timeout=LOOK_S)
            except queue.Empty:
                for session in (self.front, self.session):
                    if session is not None and time.monotonic() - begun <= 2 * LOOK_S:
                        session.look(self.silent_s)
                continue
            if over is None:
                return
            self._tear_down(*over)

    def _tear_down(self, session: ServerSession, error: BaseException) -> None:
        step = session.step
        try:
            session.tear_down(error)
            if self.front is not None:
                self.front.tear_down(error)
        except Exception as failed:  # whatever it was, the next one finds a server that is free
            self.report(
                f"ending the session: {type(failed).__name__}: {failed}".replace("\n", "; ")
            )
        with self._lock:
            self.session = self.front = None
        self.report(f"session over at step {step}: {error}".replace("\n", "; "))

    def stop(self) -> None:
        self._ended.put(None)

    def __enter__(self) -> SessionHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for session in (self.session, self.front):
            if session is not None:
                session.tear_down(LostError("the server stops"))


def _checked(said: m.Hello) -> m.Hello:
    """Raises WireError for a worker that cannot be."""
    if not 0 <= said.rank < said.workers <= MOST_WORKERS:
        raise WireError(f"worker {said.rank} of {said.workers}")
    return said
