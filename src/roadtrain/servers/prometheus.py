"""`roadtrain serve --metrics HOST:PORT`: the status of a server, switch or reducer for Prometheus.

Every scrape reads the status that `roadtrain status` shows. With a token, a scrape must present it
as a bearer token (Rule 8). Needs the package prometheus_client.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from roadtrain.environment import need
from roadtrain.errors import ConfigError
from roadtrain.servers import frames as m
from roadtrain.transport.tcp import Address, TcpOptions

SCRAPE_S = 5.0  # limit of each read and write of a connection
Expose = Callable[[Callable[[], m.Status]], Any]
GAUGES = (  # the name, a field of Figures, the help text
    ("step", "step", "Newest step that all workers have ended; -1 without a session"),
    ("committed_step", "committed", "Last durable step of this server; -1 without a session"),
    ("workers", "workers", "Workers of the session, or jobs of a switch or reducer"),
    ("connections", "connected", "Connected workers, relays or jobs"),
    ("memory_bytes", "nbytes", "Buffers in use"),
    ("memory_budget_bytes", "budget", "Buffers that may be in use"),
)
COUNTER, GAUGE = "CounterMetricFamily", "GaugeMetricFamily"
LABELED = (  # the name, the kind of metric, its label, the help text
    ("stage_seconds", COUNTER, "stage", "Busy seconds of each stage, added up over threads"),
    ("stage_bytes", COUNTER, "stage", "Bytes of each stage"),
    ("waiting_for_seconds", GAUGE, "worker", "Seconds since the last sign of a late worker"),
    ("worker_waits_seconds", GAUGE, "worker", "Seconds that a worker has waited for this process"),
)


@contextlib.contextmanager
def exposed(
    where: Address,
    options: TcpOptions,
    report: Callable[[str], None],
    status: Callable[[], m.Status],
) -> Iterator[int]:
    """Answer Prometheus at `where` while the body of `with` runs. The target is the port.

    `options`: the token and TLS certificate of the server. Raises ConfigError if the library is
    missing, the address cannot be used, or it is no loopback address and there is no token.
    """
    library: Any = need("prometheus_client", "prometheus")
    numbers = library.CollectorRegistry(auto_describe=False)
    numbers.register(_Collector(status))
    app = _guarded(library.make_wsgi_app(numbers), options.token)
    name = f"--metrics {where[0]}:{where[1]}"
    try:
        server = make_server(*where, app, _Server, _Handler)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    if options.token is None and not ip_address(str(server.server_address[0])).is_loopback:
        server.server_close()
        raise ConfigError(
            f"{name} is not a loopback address, and there is no token",
            hint="add --token-file, whose token Prometheus sends as a bearer token",
        )
    if options.tls is not None:
        context = options.tls.context(server=True)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=partial(server.serve_forever, 0.2), name="metrics")
    thread.start()
    port = int(server.server_address[1])
    scheme = "http" if options.tls is None else "https"
    report(f"metrics for Prometheus at {scheme}://{where[0]}:{port}/metrics")
    try:
        yield port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _guarded(app: Any, token: bytes | None) -> Any:
    """Return a WSGI application that refuses requests without the token."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        header = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if token is not None and not hmac.compare_digest(header, b"Bearer " + token):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"the job's token is needed as a bearer token\n"]
        return app(environ, start)

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None: ...  # a client has gone, stalls, or speaks no TLS


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_S  # a client that stalls loses its connection (Rule 5)

    def address_string(self) -> str:
        return str(self.client_address[0])  # without a look-up of the name

    def log_message(self, format: str, *args: Any) -> None: ...


class _Collector:
    """Makes metrics of a status, at each scrape."""

    def __init__(self, status: Callable[[], m.Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        core = importlib.import_module("prometheus_client.core")
        _, waits, seconds, figures = self._status()
        for name, field, text in GAUGES:
            yield core.GaugeMetricFamily(f"roadtrain_{name}", text, getattr(figures, field))
        waited = {worker: waited if what else 0.0 for worker, (waited, what) in waits.items()}
        all_values = (seconds, figures.stage_nbytes, figures.late, waited)
        for (name, kind, label, text), values in zip(LABELED, all_values, strict=True):
            family = getattr(core, kind)(f"roadtrain_{name}", text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            yield family
