"""probe(): test the links of one host to other hosts, over the addresses that training will use.
Does NOT interpret the results (findings.py).

Each test connects, waits for a reply, sends in each direction a payload larger than any network
frame, and compares the hosts' clocks. Then the rates of links are measured, one link at a time. A
client must send a token that only the ranks of this start of the job know (Rule 8).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from roadtrain.stages.findings import CardLink, Finding, LinkFault
from roadtrain.stages.rank_meeting import half_open
from roadtrain.units import KIB, MIB

# time limit of each test: the connection, the reply, and the large payload in each direction
STEP_S = 4.0
RATE_S = 0.1  # seconds of sending in which a link's rate is measured
# number of links per host whose rate is measured, so that a start stays short on large clusters
RATED = 8
LARGE = 192 * KIB  # larger than the largest MTU, 64 KiB
# the first bytes of a measurement, which the rate leaves out because buffers on the way absorb them
FIRST = 256 * KIB
MOST = 4 * MIB
TOKEN_NBYTES = 16
PINGS = 3
PING, SEND, FETCH = b"P", b"S", b"F"  # a client's requests, one byte each
CLOCK, LENGTH = struct.Struct("!d"), struct.Struct("!Q")
PIECE = bytes(64 * KIB)


@dataclass(frozen=True)
class ProbePorts:
    """The ports on which a host accepts link tests, and the token that other hosts must send."""

    token: str  # hex
    ports: dict[str, int]  # address -> port


@contextlib.asynccontextmanager
async def serving(addresses: Iterable[str]) -> AsyncIterator[ProbePorts]:
    """Reply to link tests on each of `addresses` while this context is active. Raises OSError if
    this host lacks one of the addresses."""
    token, tasks = secrets.token_bytes(TOKEN_NBYTES), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _answer(token, reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the peer reports the failure
        finally:
            tasks.discard(task)
            writer.close()

    servers, ports = list[asyncio.Server](), dict[str, int]()
    try:
        for address in dict.fromkeys(addresses):
            servers.append(await asyncio.start_server(serve, address, 0, backlog=128))
            ports[address] = servers[-1].sockets[0].getsockname()[1]
        yield ProbePorts(token.hex(), ports)
    finally:
        for server in servers:
            server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def probe(
    ports: ProbePorts, targets: Mapping[CardLink, ProbePorts]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Test all links of this host. Return the findings, and the addresses that sent packets to this
    host but could not complete a connection.

    ports: the ports of this host. targets: for each link, the open ports of the other host.
    """
    unanswered: set[str] = set()
    listening = asyncio.create_task(_watch_half_open(ports, unanswered))
    findings = await asyncio.gather(*(_test(*target) for target in targets.items()))
    listening.cancel()
    passed = [i for i, finding in enumerate(findings) if finding.fault is None]
    for i in passed[:RATED]:
        findings[i] = await _rate(findings[i], targets[findings[i].link])
    return tuple(findings), tuple(sorted(unanswered))


async def _answer(token: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(STEP_S):
        if not secrets.compare_digest(await reader.readexactly(TOKEN_NBYTES), token):
            return
    while what := await reader.read(1):
        if what == PING:
            writer.write(CLOCK.pack(time.time()))
        elif what == SEND:
            writer.write(CLOCK.pack(await _receive_rate(reader)))
        elif what == FETCH:
            writer.write(bytes(LARGE))
        else:
            return
        await writer.drain()


async def _receive_rate(reader: asyncio.StreamReader) -> float:
    """Read a client's data, and return its rate in bytes/s without the first 256 KiB, which buffers
    absorb."""
    total, begin, first = 0, time.monotonic(), 0
    while length := LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]:
        left = min(length, MOST)
        while left:
            data = await reader.read(left)
            if not data:
                raise EOFError
            left -= len(data)
            total += len(data)
            if total < FIRST:
                begin, first = time.monotonic(), total
    return (total - first) / max(time.monotonic() - begin, 1e-6)


async def _watch_half_open(ports: ProbePorts, unanswered: set[str]) -> None:
    while True:
        await asyncio.sleep(0.25)
        unanswered |= half_open(*ports.ports.values())


async def _test(link: CardLink, ports: ProbePorts) -> Finding:
    step = LinkFault.CANNOT_CONNECT
    try:
        async with _connected(link, ports) as (reader, writer):
            step = LinkFault.NO_ANSWER
            async with asyncio.timeout(STEP_S):
                pings = [await _ping(reader, writer) for _ in range(PINGS)]
            step = LinkFault.LARGE_LOST
            async with asyncio.timeout(STEP_S):
                writer.write(SEND + _framed(bytes(LARGE)) + LENGTH.pack(0))
                await writer.drain()
                await reader.readexactly(CLOCK.size)
            step = LinkFault.LARGE_LOST_BACK
            async with asyncio.timeout(STEP_S):
                writer.write(FETCH)
                await reader.readexactly(LARGE)
    except (OSError, EOFError) as error:
        late = isinstance(error, TimeoutError)
        why = f"no reply within {STEP_S:.0f} s" if late else "the connection ended"
        return Finding(link, step, getattr(error, "strerror", "") or why)
    seconds, ahead_s = min(pings)
    return Finding(link, None, "", latency_s=seconds / 2, ahead_s=ahead_s)


async def _rate(finding: Finding, ports: ProbePorts) -> Finding:
    """Return the finding with the link's measured rate, or unchanged if the measurement fails."""
    begin = time.monotonic()
    try:
        async with _connected(finding.link, ports) as (reader, writer), asyncio.timeout(STEP_S):
            writer.write(SEND)
            sent = 0
            while sent < MOST and time.monotonic() - begin < RATE_S:
                writer.write(_framed(PIECE))
                await writer.drain()
                sent += len(PIECE)
            writer.write(LENGTH.pack(0))
            (rate,) = CLOCK.unpack(await reader.readexactly(CLOCK.size))
    except (OSError, EOFError):
        return finding
    return replace(finding, bytes_per_s=rate if sent > FIRST else 0.0)


async def _ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[float, float]:
    """Return (round-trip time, clock difference) in seconds; the difference is positive if the
    other host's clock is ahead."""
    sent, begin = time.time(), time.monotonic()
    writer.write(PING)
    (there,) = CLOCK.unpack(await reader.readexactly(CLOCK.size))
    took = time.monotonic() - begin
    return took, there - (sent + took / 2)


@contextlib.asynccontextmanager
async def _connected(
    link: CardLink, ports: ProbePorts
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = link.target_address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * KIB)
        async with asyncio.timeout(STEP_S):
            sock.bind((link.source_address, 0))
            there = address, ports.ports[address]
            await asyncio.get_running_loop().sock_connect(sock, there)
            reader, writer = await asyncio.open_connection(sock=sock, limit=MIB)
        try:
            writer.write(bytes.fromhex(ports.token))
            yield reader, writer
        finally:
            writer.transport.abort()


def _framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
