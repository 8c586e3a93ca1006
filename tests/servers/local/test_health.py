"""`roadtrain status` of servers that train: which workers are connected, what each process waits for
and for how long (Rule 5)."""

import os
import re
import signal
import time

import pytest

from roadtrain import cli
from roadtrain.transport.address import write_token
from tests.support.models import Case
from tests.support.processes import HostProcess, Workers

SECRET = b"a secret of the job"


@pytest.fixture
def host(tmp_path):
    write_token(tmp_path / "token", SECRET)
    host = HostProcess(tmp_path / "host", token=SECRET)
    yield host
    host.kill()


def status_matching(capsys, where, token_file, until, deadline_s=30.0):
    """Run the command until its output matches `until`, and return that output."""
    begin, out = time.monotonic(), ""
    while time.monotonic() - begin < deadline_s:
        cli.main(["status", where, "--token-file", str(token_file)])
        out = " ".join(capsys.readouterr().out.split())
        if re.search(until, out):
            return out
        time.sleep(0.2)
    raise AssertionError(f"no {until!r} in: {out}")


def test_a_stopped_worker_is_named_by_each_process_that_waits_for_it(host, tmp_path, capsys):
    token = tmp_path / "token"
    status_matching(capsys, host.where, token, "server 0.*no session: waiting for workers")
    workers = Workers(Case(clip=0.5), [host.where], tmp_path, 100000, 2, token=SECRET)
    try:
        status_matching(capsys, host.where, token, "step [1-9].* 2 worker")
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        out = status_matching(
            capsys,
            host.where,
            token,
            r"waiting [2-9]\.\d s for the (gradient|release|end|update)",
        )
        server = re.search(
            r"(server 0.*?)worker 0 .*worker 1 \(127.0.0.1\) waits for no server", out
        )[1]
        assert "worker 1 (127.0.0.1)" in server, "the server does not name the worker it waits for"
        before = re.search(r"step (\d+),", server)[1]
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        # the status requests did not disturb training
        status_matching(capsys, host.where, token, rf"step (?!{before},)\d+, 2 worker")
    finally:
        for process in workers.processes:
            process.kill()
            process.join()


# Rule 8
def test_a_silent_server_is_named_and_a_wrong_token_is_refused(host, tmp_path, capsys):
    write_token(tmp_path / "other")
    assert (
        cli.main(["status", f"{host.where},127.0.0.1:1", "--token-file", str(tmp_path / "token")])
        == 1
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "no session" in out and re.search("server 1.*does not answer: .*refused", out)
    assert cli.main(["status", host.where, "--token-file", str(tmp_path / "other")]) == 1
    assert "token does not match" in " ".join(capsys.readouterr().out.split())


def test_an_incomplete_session_names_the_missing_worker(host, tmp_path, capsys):
    workers = Workers(Case(), [host.where], tmp_path, 100000, 2, token=SECRET, retry_s=60)
    try:
        os.kill(workers.processes[0].pid, signal.SIGSTOP)  # before it connects or soon afterwards
        waits = r"(?=.*of worker 0).*(the opened store|\d worker\(s\))"
        status_matching(capsys, host.where, tmp_path / "token", waits, deadline_s=60)
    finally:
        for process in workers.processes:
            process.kill()
            process.join()
