"""The process of `roadtrain serve`, which serves one session of workers at a time:

    listening -> a worker joins -> ServerSession -> all workers leave, or one is lost -> listening

A worker that is lost, or sends no heartbeat for 60 seconds, ends the session. Uncommitted contents
are dropped. The next session starts at the last committed step (Rule 3), also after a restart of
this process. The server does not restart workers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from roadtrain.errors import ConfigError, ForeignError, LostError, RoadtrainError, WireError
from roadtrain.options.budgets import host_bytes_of
from roadtrain.servers import frames as m
from roadtrain.servers import health, routes
from roadtrain.servers.connection import MOST_WORKERS
from roadtrain.servers.hosted_store import HostedStore
from roadtrain.servers.prometheus import Expose, exposed
from roadtrain.servers.routes import RouteEnd
from roadtrain.servers.server_session import ServerSession
from roadtrain.servers.trace import Stages
from roadtrain.storage.direct import check_directory
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.plugins import link_options, load, plugin_names
from roadtrain.transport.tcp import Address, TcpOptions, listen
from roadtrain.units import show_bytes

Report = Callable[[str], None]
SILENT_S = 60.0  # a session ends if a worker sends no heartbeat for so long
LOOK_S = 1.0  # time between two checks of the session
EVERY = 100  # default number of steps between two snapshots
# Entry points of the other roles of `roadtrain serve`. Each is a function of the address, the
# memory as the user wrote it (or None), the options of links, an option of the role, and a function
# whose context exposes a status.
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
    metrics: str | None = None,
) -> int:
    """Serve parameters and optimizer state to workers (servers.addresses of their job). Running the
    same command again resumes.

    `roadtrain serve HOST:PORT --store DIR`, or `--sum`, or `--switch`.

    Args:
        store: directory of the state (a directory in /dev/shm is in memory)
        sum: sum gradients for workers that keep their own state (roadtrain.Summation), instead of
            serving a store
        formats: with --sum: a module to import that registers your own formats
        budget: memory for buffers, such as 4GiB (default: half of the free memory)
        snapshot: directory on files to which a state in memory is copied during training
        snapshot_every: steps between two snapshots (default: 100); must be the same at all servers
            of a job
        token_file: file (mode 600) with the workers' token; required if HOST is not a loopback
            address
        cert: TLS: PEM file of this server's certificate
        key: TLS: PEM file of the key of this certificate
        client_ca: TLS: PEM file of the CA that must have signed the workers' certificates (default:
            workers need no certificates)
        ca: the older name of --client-ca
        link: tcp, or the name of a plugin's link such as rdma; workers must use the same link
            (default: tcp)
        switch: run a switch instead of a server: sum gradients and copy parameters for jobs with a
            fan_in; datagrams arrive at the 64 UDP ports above PORT
        memory: with --switch: memory for the tables and sockets of all jobs (default: 256MiB)
        xdp: with --switch: sum packets of this network device, such as eth0, in the kernel (if this
            is impossible, the switch prints the reason and sums in user space)
        metrics: HOST:PORT of a page for Prometheus; with --token-file, a scrape must send the token
            as a bearer token, and HOST may be any address
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
            f"both --ca {ca} and --client-ca {client_ca} are set",
            hint="--ca is the older name of --client-ca: use --client-ca only",
        )
    tls = tls_of(cert, key, client_ca or ca)
    if tls is not None and cert is None:
        raise ConfigError("TLS: a server needs both --cert and --key")
    options = link_options(link)(token=token_of(token_file), tls=tls)
    expose: Expose = contextlib.nullcontext
    if metrics is not None:
        expose = partial(exposed, address_of(metrics), options, print)
    if switch:
        return load(ROLES, "switch")(where, memory, options, xdp, expose)
    if store is None:
        return load(ROLES, "sum")(where, budget, options, formats, expose)
    nbytes = host_bytes_of(budget, whole=False)
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
            f"serving {store} at {host.where}, at most {show_bytes(nbytes)}; the state is"
            f" {host.store.rests}"
        )
        with expose(host.status):
            host.run()
    return 0


def _check_switch(
    switch: bool, of_switches: Mapping[str, str | None], of_servers: Mapping[str, object]
) -> None:
    """Raise ConfigError if options of a switch and of a server are combined."""
    extra = [name for name, value in of_servers.items() if value is not None and value is not False]
    if switch and extra:
        raise ConfigError(
            f"--switch cannot be combined with {', '.join(extra)}",
            hint="a switch keeps no state, and --memory limits the memory of a switch; run servers"
            " with --store or --sum as separate commands",
        )
    extra = [f"{name} {value}" for name, value in of_switches.items() if value is not None]
    if extra and not switch:
        raise ConfigError(
            f"{', '.join(extra)} without --switch has no effect",
            hint="add --switch; the memory of a server with --store or --sum is set by --budget",
        )


def _check_server(
    store: str | None,
    sum: bool,
    formats: str | None,
    snapshot: str | None,
    snapshot_every: int | None,
) -> None:
    """Raise ConfigError if options of a server contradict each other."""
    if (store is None) != sum:
        raise ConfigError(
            f"--store {store} and --sum are both set, but exclude each other"
            if sum
            else "nothing to serve: neither --store nor --sum is set",
            hint=(
                "--store names a directory on the device for the state (in /dev/shm the state is in"
                " memory and survives this process, but not the machine); --sum keeps no state"
            ),
        )
    if sum and snapshot is not None:
        raise ConfigError(
            f"--snapshot {snapshot} copies a state, but a server with --sum keeps no state",
            hint="leave out --snapshot",
        )
    if formats is not None and not sum:
        raise ConfigError(f"--formats {formats} can only be used with --sum", hint="leave it out")
    twice = snapshot is not None and snapshot == store
    if twice or (snapshot_every is not None and (snapshot is None or snapshot_every < 1)):
        values = {"--snapshot": snapshot, "--snapshot-every": snapshot_every, "--store": store}
        raise ConfigError(
            "invalid options: "
            + ", ".join(f"{name} {value}" for name, value in values.items() if value is not None),
            hint="--snapshot must not be --store; --snapshot-every needs --snapshot and 1 or more",
        )


class SessionHost:
    """A server with a store that listens for workers and serves one session at a time.

    `run` returns after `stop`.
    """

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
        self.silent_s = silent_s  # the longest time without a heartbeat of a worker
        self.session: ServerSession | None = None
        # the end of the workers' route, which accepts the workers of `session`; None if direct
        self.front: RouteEnd | None = None
        self._options = options
        self._stages = Stages()  # of this session, or of the last one
        self._ended: queue.SimpleQueue[tuple[ServerSession, BaseException] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()  # guards `session` and `front`
        self._listener = listen(address, self._accept, options, report, language=m.LANGUAGE)
        self.where = "{}:{}".format(*self._listener.address)

    def _accept(self, link: Link, hello: bytes) -> Receiver:
        """Accept a link, after the peer has proved to know the token."""
        if hello == health.HELLO:
            return health.answer(link, self.status())
        if hello == health.ASK_INTERVALS:
            return health.answer(link, self._stages.intervals())
        if hello.startswith(m.WITHOUT):
            rest = m.decoded(m.WITHOUT_REST, hello[len(m.WITHOUT) :], "not a witness")
            done = self._resume_without(rest)
            text = "noted" if done else "not the last session here"
            return health.answer(link, (text, {}, {}, m.Figures()))
        if (by_route := routes.named_in(hello)) is not None:
            return self._accept_by_route(link, *by_route)
        greeting = _checked(m.decoded(m.HELLO, hello, "not the greeting of a worker"))
        with self._lock:
            session = self.session
            if session is None:
                session = self.session = ServerSession(greeting, self)
                self._stages = session.stages
            elif self.front is not None:
                name = self.front.name
                raise self._other_route(greeting, name, "worker {} has no {}, but others have one")
            elif not session.is_of(greeting) or greeting.rank in session.connections:
                if session.deserted:  # another start of the job begins
                    session.end(LostError("its workers have left"))
                raise session.busy()
            return session.admit(greeting.rank, link, greeting.signature)

    def _accept_by_route(self, link: Link, name: str, rest: bytes) -> Receiver:
        """Accept a participant (a worker or a relay) whose route has a RouteEnd."""
        end_class = routes.load(name).end if name in plugin_names(routes.GROUP) else None
        if end_class is None:
            raise WireError(
                f"{self.where} is a server with a store, not a {name}",
                hint="use this address in the list of the job's servers only",
            )
        greeting = end_class.greeting(rest)
        hello = _checked(greeting.hello)
        with self._lock:
            if self.session is None:
                self.front = end_class(greeting, self, self._options)
                self.session = self.front.server
                self._stages = self.session.stages
            elif not isinstance(self.front, end_class):
                raise self._other_route(hello, name, "worker {} has a {}, but the others have none")
            elif not self.front.is_of(hello):
                raise self.front.busy()
            return self.front.accept(link, greeting)

    def _other_route(self, hello: m.Hello, route: str, words: str) -> RoadtrainError:
        """Return the error for a worker whose route differs from that of the session.

        `words` is the message, with places for the worker's rank and the option.
        """
        assert self.session is not None
        if hello.session != self.session.name:
            return self.session.busy()
        option = route.replace("-", "_")
        return ForeignError(
            words.format(hello.rank, option), hint=f"use the same {option} on every worker"
        )

    def status(self) -> m.Status:
        idle = m.Figures(budget=self.nbytes)
        doing: m.Status = "no session: waiting for workers", {}, {}, idle
        if (session := self.front or self.session) is not None:
            doing = session.status()
        return f"state {self.store.rests}; {doing[0]}", *doing[1:]

    def _resume_without(self, witness: m.Without) -> bool:
        opened = None if self.session is None else self.session.tier
        meta = self.store.resume_without(*witness, opened)
        if meta is None:
            return False
        others = ", ".join(map(str, witness.servers))
        self.report(f"server {meta.index}: may resume without server(s) {others}")
        return True

    def session_ended(self, session: ServerSession, error: BaseException) -> None:
        self._ended.put((session, error))

    def run(self) -> None:
        """Tear down sessions that have ended, and check running sessions for silent workers, until
        `stop`.

        If this process itself was suspended, one check is skipped, so that waiting heartbeats can
        be read first.
        """
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
        except Exception as failed:  # the next session must find a free server after any error
            self.report(
                f"failed to end the session: {type(failed).__name__}: {failed}".replace("\n", "; ")
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


def _checked(hello: m.Hello) -> m.Hello:
    """Return `hello`. Raises WireError if its rank or number of workers is impossible."""
    if not 0 <= hello.rank < hello.workers <= MOST_WORKERS:
        raise WireError(
            f"invalid hello: worker {hello.rank} of {hello.workers} (limit: {MOST_WORKERS} workers)"
        )
    return hello
