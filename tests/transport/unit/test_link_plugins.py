"""A link declared by another distribution is found by its name and carries frames."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from roadtrain import cli
from roadtrain.errors import ConfigError
from roadtrain.servers.serve import SessionHost
from roadtrain.transport import plugins, tcp
from roadtrain.units import MIB

TOKEN = b"a secret of the job"
# The author of a link writes this module and an entry point in pyproject.toml.
TOY = '''
"""A link that carries each byte turned over."""

from dataclasses import dataclass

from roadtrain.transport import tcp

TURNED = bytes(255 - byte for byte in range(256))


@dataclass(frozen=True)
class Options(tcp.TcpOptions):
    def channel(self, sock):
        return Turned(super().channel(sock))


class Turned:
    def __init__(self, inner):
        self.inner = inner

    def send(self, buffers):
        return self.inner.send([bytes(buffer).translate(TURNED) for buffer in buffers])

    def recv_into(self, view, whole):
        n = self.inner.recv_into(view, whole)
        view[:n] = bytes(view[:n]).translate(TURNED)
        return n

    def shutdown(self):
        self.inner.shutdown()

    def close(self):
        self.inner.close()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a distribution with the given entry points on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(distribution: str, **links: str) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {value}\n" for name, value in links.items()]
        info.joinpath("entry_points.txt").write_text(f"[{plugins.GROUP}]\n{''.join(lines)}")

    tmp_path.joinpath("toy_link.py").write_text(TOY)
    return installed


class Receiver:
    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes, bytes]] = []
        self.has_arrived = threading.Event()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.frames.append((kind, header, bytes(payload)))
        self.has_arrived.set()

    def lost(self, error: Exception) -> None: ...


def test_a_link_of_another_distribution_carries_frames(install) -> None:
    install("toy_link", toy="toy_link:Options")
    assert plugins.link_names()[0] == "tcp" and "toy" in plugins.link_names()
    options = plugins.link_options("toy")(token=TOKEN)
    assert type(options).__module__ == "toy_link"
    there = Receiver()
    listener = tcp.listen(("127.0.0.1", 0), lambda link, hello: there, options, lambda line: None)
    try:
        link = tcp.connect(listener.address, Receiver(), options, name="there")
        payload = bytes(range(256)) * 1000
        link.send(7, b"header", [memoryview(payload)])
        assert there.has_arrived.wait(10)
        link.close()
        assert there.frames == [(7, b"header", payload)]
    finally:
        listener.close()


def test_status_queries_a_server_over_its_link(install, tmp_path: Path, capsys) -> None:
    install("toy_link", toy="toy_link:Options")
    options = plugins.link_options("toy")()
    with SessionHost(
        ("127.0.0.1", 0), tmp_path / "store", 64 * MIB, options, lambda line: None
    ) as host:
        thread = threading.Thread(target=host.run)
        thread.start()
        try:
            assert cli.main(["status", host.where, "--link", "toy"]) == 0
            assert host.where in capsys.readouterr().out
            assert cli.main(["status", host.where]) == 1
        finally:
            host.stop()
            thread.join()


def test_tcp_needs_no_plugin() -> None:
    assert plugins.link_options("tcp") is tcp.TcpOptions


def test_an_invalid_link_is_refused_in_one_sentence(install) -> None:
    install("toy_link", toy="toy_link:Options", gone="toy_link:Gone", none="toy_link:TURNED")
    with pytest.raises(ConfigError, match=r"unknown link `toi`\nhint: did you mean `toy`\?"):
        plugins.link_options("toi")
    with pytest.raises(ConfigError, match="`gone` is toy_link:Gone of toy_link, which cannot be"):
        plugins.link_options("gone")
    with pytest.raises(
        ConfigError, match="`none` is toy_link:TURNED of toy_link, but is not a subclass"
    ):
        plugins.link_options("none")


def test_a_name_declared_twice_is_refused(install) -> None:
    install("toy_link", toy="toy_link:Options")
    install("other_link", toy="other_link:Options")
    with pytest.raises(ConfigError, match=r"`toy` is declared by .*_link and by .*_link"):
        plugins.link_options("toy")


def test_a_plugin_cannot_replace_tcp(install) -> None:
    install("toy_link", tcp="toy_link:Options")
    with pytest.raises(ConfigError, match="`tcp` is declared by toy_link and by roadtrain"):
        plugins.link_names()
