"""`roadtrain serve --metrics`: pages that Prometheus's own parser reads, for servers, reducers and
switches, and who may read them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roadtrain.errors import ConfigError
from roadtrain.servers import frames as m
from roadtrain.servers.prometheus import exposed
from roadtrain.transport.address import write_token
from roadtrain.transport.tcp import TcpOptions
from tests.support.models import Case
from tests.support.processes import Workers

parser = pytest.importorskip("prometheus_client.parser")
SECRET = b"a secret of the job"
STATUS: m.Status = (
    "step 5",
    {"worker 0 (127.0.0.1)": (2.5, "chunk 3"), "worker 1 (127.0.0.1)": (0.0, "")},
    {"Update": 1.5},
    m.Figures(7, 6, 2, 2, 100, 200, {"Update": 4096}, {"worker 1 (127.0.0.1)": 3.0}),
)
Samples = dict[tuple[str, str], float]


def scrape(port: int, token: bytes | None = None) -> Samples:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token.decode()}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def code_of(port: int, token: bytes | None) -> int:
    with pytest.raises(urllib.error.HTTPError) as raised:
        scrape(port, token)
    raised.value.close()
    return raised.value.code


def test_the_figures_of_a_status_are_metrics() -> None:
    with exposed(("127.0.0.1", 0), TcpOptions(), lambda line: None, lambda: STATUS) as port:
        assert scrape(port) == {
            ("roadtrain_step", ""): 7,
            ("roadtrain_committed_step", ""): 6,
            ("roadtrain_workers", ""): 2,
            ("roadtrain_connections", ""): 2,
            ("roadtrain_memory_bytes", ""): 100,
            ("roadtrain_memory_budget_bytes", ""): 200,
            ("roadtrain_stage_seconds_total", "Update"): 1.5,
            ("roadtrain_stage_bytes_total", "Update"): 4096,
            ("roadtrain_waiting_for_seconds", "worker 1 (127.0.0.1)"): 3.0,
            ("roadtrain_worker_waits_seconds", "worker 0 (127.0.0.1)"): 2.5,
            ("roadtrain_worker_waits_seconds", "worker 1 (127.0.0.1)"): 0.0,
        }


def test_only_the_token_opens_the_page() -> None:
    """Rule 8."""
    options = TcpOptions(token=SECRET)
    with exposed(("0.0.0.0", 0), options, lambda line: None, lambda: STATUS) as port:
        assert scrape(port, SECRET)["roadtrain_step", ""] == 7
        for wrong in (None, b"a secret of the jo", SECRET + b"x", b""):
            assert code_of(port, wrong) == 401
    with (
        pytest.raises(ConfigError, match="not a loopback address"),
        exposed(("0.0.0.0", 0), TcpOptions(), lambda line: None, lambda: STATUS),
    ):
        pass


def test_clients_that_stall_do_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 5. As many as are answered at once."""
    monkeypatch.setattr("roadtrain.servers.prometheus._Handler.timeout", 0.5)
    with (
        exposed(("127.0.0.1", 0), TcpOptions(), lambda line: None, lambda: STATUS) as port,
        socket.create_connection(("127.0.0.1", port)) as a,
        socket.create_connection(("127.0.0.1", port)) as b,
        socket.create_connection(("127.0.0.1", port)) as c,
        socket.create_connection(("127.0.0.1", port)) as d,
    ):
        for stalled in (a, b, c, d):
            stalled.sendall(b"GET /metr")
        assert scrape(port)["roadtrain_step", ""] == 7


def test_an_address_in_use_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(ConfigError, match="in use"),
        exposed(busy.getsockname(), TcpOptions(), lambda line: None, lambda: STATUS),
    ):
        pass


@contextmanager
def serving(*args: str) -> Iterator[tuple[str, int]]:
    """Run `roadtrain serve`; yield its address and the port of its metrics."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "roadtrain", "serve", where, "--metrics", "127.0.0.1:0", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"http://127.0.0.1:(\d+)/metrics", line):
                    yield where, int(found[1])
                    break
            else:
                raise AssertionError("no line names the page")
        finally:
            process.kill()


def test_the_pages_of_a_server_that_trains(tmp_path: Path) -> None:
    write_token(tmp_path / "token", SECRET)
    files = ("--store", str(tmp_path / "store"), "--token-file", str(tmp_path / "token"))
    with serving(*files) as (where, port):
        assert code_of(port, b"another secret") == 401
        first = scrape(port, SECRET)
        assert first["roadtrain_connections", ""] == 0 and first["roadtrain_step", ""] == -1
        workers = Workers(Case(clip=0.5), [where], tmp_path, 100000, 2, token=SECRET)
        try:
            found, deadline = first, time.monotonic() + 60
            while found["roadtrain_committed_step", ""] < 3:
                assert time.monotonic() < deadline, found
                time.sleep(0.1)
                found = scrape(port, SECRET)
            later = scrape(port, SECRET)
        finally:
            for process in workers.processes:
                process.kill()
                process.join()
    assert found["roadtrain_step", ""] >= found["roadtrain_committed_step", ""]
    assert found["roadtrain_workers", ""] == found["roadtrain_connections", ""] == 2
    used, most = found["roadtrain_memory_bytes", ""], found["roadtrain_memory_budget_bytes", ""]
    assert 0 < used <= most  # Rule 4
    for stage in ("Update", "Write", "Sum"):
        for kind in ("seconds", "bytes"):
            key = f"roadtrain_stage_{kind}_total", stage
            assert 0 < found[key] <= later[key], key
    assert {"worker 0 (127.0.0.1)", "worker 1 (127.0.0.1)"} == {
        label for name, label in found if name == "roadtrain_worker_waits_seconds"
    }


@pytest.mark.parametrize("role", ["--sum", "--switch"])
def test_the_pages_of_other_roles(role: str) -> None:
    with serving(role) as (_, port):
        found = scrape(port)
    assert found["roadtrain_workers", ""] == found["roadtrain_connections", ""] == 0
    assert found["roadtrain_memory_bytes", ""] < found["roadtrain_memory_budget_bytes", ""]
