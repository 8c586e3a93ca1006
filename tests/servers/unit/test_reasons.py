"""A worker that ends because of a lost server tells the other servers why, so that their workers'
errors name the cause (Rule 5)."""

import pytest

from roadtrain.chunks import ChunkTable
from roadtrain.errors import LostError
from roadtrain.servers import frames as m
from roadtrain.servers.parameter_connection import ParameterConnection
from roadtrain.servers.remote_server import RemoteServer


class Wire:
    """A link that records sent messages in order; None marks its end."""

    def __init__(self):
        self.sent = []

    def send(self, kind, header, parts=(), sent=None, *, urgent=False):
        self.sent.append((kind, header))

    def close(self):
        self.sent.append(None)


class Session:
    def __init__(self):
        self.ends = []

    def left(self, connection, error):
        self.ends.append((connection.rank, str(error)))


@pytest.mark.parametrize("server_is_lost", [True, False])
def test_a_worker_sends_the_reason_of_its_end(server_is_lost):
    servers = {}
    for number in (0, 1):
        servers[number] = RemoteServer(number, f"server {number}", servers, ChunkTable.build([]))
        servers[number].link = Wire()
    if server_is_lost:
        servers[1].lost(LostError("server 1: ended without a goodbye"))
    servers[0].close()
    *frames, end = servers[0].link.sent
    assert end is None

    session = Session()
    connection = ParameterConnection(session, 3, Wire())
    for kind, header in frames:
        connection.arrived(kind, header, memoryview(b""))
    connection.lost(LostError("worker 3: closed by peer"))
    reason = "the worker ended with LostError: server 1: ended without a goodbye"
    assert session.ends == [(3, reason if server_is_lost else "worker 3: closed by peer")]
    assert {kind for kind, _ in frames} == ({m.FAILED} if server_is_lost else set())
