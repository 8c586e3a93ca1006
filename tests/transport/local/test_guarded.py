"""Access control over every kind of link: TLS with client certificates, tokens and their files, and
the messages that workers exchange in the clear (Rule 8)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from benchmarks.sums.pending_sums import PendingSums
from roadtrain import cli
from roadtrain.config.job import make_job
from roadtrain.errors import AuthError, ConfigError, RoadtrainError
from roadtrain.planner import probe_links
from roadtrain.servers import frames as m
from roadtrain.servers import health, serve
from roadtrain.sums import sums as service
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.training.job_options import servers_of
from roadtrain.transport.address import address_of, tls_of, token_of, write_token
from roadtrain.transport.tcp import TcpOptions, Tls
from tests.support.models import Case
from tests.support.needs import needs
from tests.support.processes import HostProcess, Workers, losses

SECRET = b"a secret of the job"
with_openssl = needs("openssl", apt="openssl")


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Tls:
    """A self-signed certificate for 127.0.0.1."""
    home = tmp_path_factory.mktemp("tls")
    cert, key = home / "cert.pem", home / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
            "-subj",
            "/CN=roadtrain test",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    return Tls(cert, key, cert)


@pytest.fixture
def token(tmp_path):
    write_token(tmp_path / "token", SECRET)
    return tmp_path / "token"


# Token files


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660])
def test_a_token_that_others_can_read_or_change_is_refused(token, mode):
    assert token_of(str(token)) == SECRET
    token.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"the token in .* .mode {mode:o}, at most 600[^\n]*\n?hint: chmod 600"
    ):
        token_of(str(token))


def test_a_short_token_is_refused_wherever_it_is_named(tmp_path, capsys):
    write_token(tmp_path / "token", b"hunter2 hunter2\n")
    short = str(tmp_path / "token")
    for words in (
        ["serve", "127.0.0.1:0", "--sum", "--token-file", short],
        ["status", "127.0.0.1:1", "--token-file", short],
        ["probe", "--listen", "127.0.0.1:0", "--token-file", short],
    ):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert "must have 16 to 4096 bytes, but has 15" in error and "umask 077" in error


def test_a_new_token_is_private_to_its_owner(tmp_path):
    old = os.umask(0)
    try:
        write_token(tmp_path / "token")
    finally:
        os.umask(old)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert len(token_of(str(tmp_path / "token"))) == 64


# Parameter servers


@with_openssl
@pytest.mark.parametrize("relay", [None, "96MiB"])
def test_training_over_tls_with_client_certificates(relay, tls, tmp_path):
    """This holds through a relay, too, which the server sees as the worker."""
    host = HostProcess(tmp_path / "host", token=SECRET, tls=tls)
    try:
        options = {"token": SECRET, "retry_s": 5} | ({"relay": relay} if relay else {})
        workers = Workers(Case(), [host.where], tmp_path, 2, 1, tls=tls, **options)
        assert workers.join() == [0], workers.errors()
        assert {"1", "2"} <= set(losses(workers.logs[0]))
        for kind, without in (("AuthError", Tls(ca=tls.ca)), ("Error", None)):
            (tmp_path / kind).mkdir()
            stranger = Workers(
                Case(), [host.where], tmp_path / kind, 2, 1, tls=without, token=SECRET, retry_s=0
            )
            assert stranger.join() == [3]
            assert "server 0" in stranger.errors()[0]
    finally:
        host.kill()


@with_openssl
def test_tls_keys_of_a_job_and_options_of_commands_are_checked(tls, token, tmp_path, capsys):
    job = make_job(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"config": {"model_type": "gpt2"}},
            "data": {"paths": [str(tmp_path)]},
            "servers": {
                "addresses": ["127.0.0.1:7000"],
                "token_file": str(token),
                "ca": str(tls.ca),
                "cert": str(tls.cert),
                "key": str(tls.key),
            },
        }
    )
    link = servers_of(job).options(1.0)
    assert link.tls == tls and link.token == SECRET
    for words in ({"key": str(tls.key)}, {"cert": str(tmp_path / "none.pem")}):
        with pytest.raises(ConfigError):
            tls_of(words.get("cert"), words.get("key"), None)
    with pytest.raises(ConfigError, match="--cert and --key"):
        serve.command("127.0.0.1:0", sum=True, client_ca=str(tls.ca))
    with pytest.raises(ConfigError, match="older name"):
        serve.command(
            "127.0.0.1:0", sum=True, cert=str(tls.cert), key=str(tls.key), ca="a", client_ca="b"
        )
    words = ["--token-file", str(token), "--cert", str(tls.cert), "--key", str(tls.key)]
    with spare_host(*words, "--client-ca", str(tls.ca)) as where:
        assert cli.main(["status", where, *words, "--ca", str(tls.ca)]) == 0
        assert "sums for 0 job(s)" in capsys.readouterr().out
        assert cli.main(["status", where, "--token-file", str(token), "--ca", str(tls.ca)]) == 1
        assert cli.main(["status", where, "--token-file", str(token)]) == 1


@with_openssl
def test_a_probe_uses_tls(tls):
    options = TcpOptions(token=SECRET, tls=tls)
    listener = probe_links.listening(
        "127.0.0.1:0", options, lambda: probe_links.ProbeReport(missing=["all"])
    )
    where = "{}:{}".format(*listener.address)
    try:
        assert probe_links.ask(where, probe_links.DESCRIBE, "", options).missing == ["all"]
        with pytest.raises(RoadtrainError):
            probe_links.ask(
                where, probe_links.DESCRIBE, "", TcpOptions(token=SECRET, handshake_s=1.0)
            )
    finally:
        listener.close()


# The summation service


@contextlib.contextmanager
def spare_host(*words):
    """Run `roadtrain serve --sum` in a process. Yields its address."""
    command = [
        sys.executable,
        "-m",
        "roadtrain.cli",
        "serve",
        "127.0.0.1:0",
        "--sum",
        "--budget",
        "8MiB",
        *words,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        try:
            yield re.search(r"summing at (\S+),", process.stdout.readline())[1]
        finally:
            process.kill()


class Meeting:
    """Workers as threads that meet. `messages` are all messages that they exchange in the clear."""

    def __init__(self, monkeypatch, hosts):
        self.workers, self.messages = len(hosts), []
        self._meet, self._posted = threading.Barrier(self.workers, timeout=20), [b""] * self.workers
        here = threading.local()
        monkeypatch.setattr(service, "host_identity", lambda: hosts[here.rank])
        self._here = here

    def run(self, spares, addresses=None, work=None, **options):
        """Return the result or the error of each worker's `work(rank, sums)`."""
        results = [None] * self.workers

        def run_worker(rank):
            self._here.rank, ends = rank, contextlib.ExitStack()

            def exchange(message):
                self._posted[rank] = message
                self._meet.wait()
                messages = list(self._posted)
                if rank == 0:
                    self.messages += messages
                self._meet.wait()
                return messages

            try:
                address = (addresses or {}).get(rank, "127.0.0.1")
                setup = service.SumSetup(rank, self.workers, False, "sum", address, 1 << 26, 20)
                sums = service.connect(spares[rank], setup, exchange)
                ends = sums.ends
                results[rank] = work(rank, sums.near) if work else sums
            except RoadtrainError as error:
                results[rank] = error
            finally:
                ends.close()

        threads = [
            threading.Thread(target=run_worker, args=(rank,)) for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


def ones(rank, sums):
    grad, out = np.full(50_000, rank + 1, np.float32), np.zeros(50_000, np.float32)
    pending = PendingSums(sums)
    pending.sum(1, m.as_bytes(grad), out.view(np.uint8).data, "fp32")
    pending.wait()
    return out[0], out[-1]


@with_openssl
@pytest.mark.parametrize("hosts", [["one", "two"], ["one", "one"], ["one", "one", "two"]])
def test_workers_and_a_spare_host_sum_over_tls(hosts, tls, token, monkeypatch):
    """The messages in the clear contain no token, and no secret from which a token can be
    derived."""
    meeting = Meeting(monkeypatch, hosts)
    words = [
        "--token-file",
        str(token),
        "--cert",
        str(tls.cert),
        "--key",
        str(tls.key),
        "--client-ca",
        str(tls.ca),
    ]
    with spare_host(*words) as where:
        spares = SpareHosts([where], None, SECRET, tls)
        total = sum(range(1, len(hosts) + 1))
        assert meeting.run([spares] * len(hosts), work=ones) == [(total, total)] * len(hosts)
        assert isinstance(
            health.ask(address_of(where), TcpOptions(token=SECRET, handshake_s=2.0)), RoadtrainError
        )
    messages = b"".join(meeting.messages)
    for secret in (SECRET, spares.own_token(), spares.own_token().hex().encode()):
        assert secret not in messages
    addresses = [place for place in meeting.messages if b"127.0.0.1" in place and b"sums" in place]
    assert len(addresses) == (0 if len(set(hosts)) == 1 else len(hosts)), (
        "workers of a single host need no port"
    )


def test_workers_of_several_hosts_need_a_token(monkeypatch):
    meeting = Meeting(monkeypatch, ["one", "two"])
    for error in meeting.run([SpareHosts((), None, None)] * 2, {1: "192.0.2.1"}):
        with pytest.raises(ConfigError, match=r"workers on 2 hosts have no token(?s:.*)token="):
            raise error
    for error in meeting.run([SpareHosts((), None, SECRET), SpareHosts((), None, None)]):
        with pytest.raises(ConfigError, match="worker 0 has token, but worker 1 has no token"):
            raise error
    for error in meeting.run([SpareHosts((), None, SECRET, Tls(ca="x"))] * 2):
        with pytest.raises(ConfigError, match="tls without cert or ca"):
            raise error


def test_workers_with_different_tokens_cannot_connect(monkeypatch):
    monkeypatch.setattr(service, "LEAVE_S", 0.1)
    meeting = Meeting(monkeypatch, ["one", "two"])
    results = meeting.run(
        [
            SpareHosts((), None, SECRET),
            SpareHosts((), None, b"another secret of a job"),
        ]
    )
    assert any(isinstance(error, AuthError) for error in results)


def test_workers_of_one_host_need_no_token(monkeypatch):
    meeting = Meeting(monkeypatch, ["one", "one"])
    assert (
        meeting.run([SpareHosts((), None, None)] * 2, {0: "192.0.2.1"}, work=ones)
        == [(3.0, 3.0)] * 2
    )
