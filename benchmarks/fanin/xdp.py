"""Item `rate` of `fanin`: measure the packets a second that the switch's table adds on one core, in
the kernel (XDP) and in user space. Each switch is compared with a plain forwarder of the same kind.

Two children send packets of int32. In the rows "alone", the kernel runs the program without a
device. In the rows "over a link", the sender, the switch and the receiver share one core and a link
of the lab. In the rows "its process alone", only the processor time of the switch's process counts,
including system calls.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.children import Child, pause, running, send_value
from benchmarks.common.report import Row
from benchmarks.common.rows import row
from benchmarks.fanin import processors
from benchmarks.fanin.transfer import Bench
from roadtrain.errors import RoadtrainError
from roadtrain.lab import LabHost, LabNic, Network
from roadtrain.switch import packets
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.packets import PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.switch.switch_table import SwitchTable
from roadtrain.units import MIB
from roadtrain_switch_offload import xdp
from roadtrain_switch_offload.bpf_object import NATIVE, BpfError, BpfObject
from roadtrain_switch_offload.xdp import XdpDevice
from roadtrain_switch_offload.xdp_table import LIVE, MOST_JOBS, UDP_HEADER, XdpJob, XdpTable

FORWARDER = Path(__file__).with_name("xdp_forward.bpf.c")
PLUGIN = xdp.OBJECT.parents[2]  # its Makefile compiles the forwarder, too
KEY, JOB, PORT, CHILDREN, SLOTS = PacketKey.derive(b"benchmark", bytes(16)), 1, 9001, 2, 2048
RUN, ALONE = 44, 20_000  # packets of one call; packets that the program handles alone
RATE = 5e9  # bytes/s: the processor is the limit
WAIT_S, START_S = 0.05, 30.0


def rows(bench: Bench) -> Iterator[Row]:
    """Compare each switch with the forwarder of the same kind. One row tells the reason why sums in
    the kernel cannot be measured.
    """
    seconds = 1.0 if bench.quick else 5.0
    with Network({name: [LabNic(RATE)] for name in ("switch", "ends")}) as lab:
        yield from _rows("user space", _in_user_space(lab, bench.home, seconds))
        try:
            found = {"alone": (alone("sum"), alone("forward"))}
            found |= _in_kernel(lab, bench.home, seconds)
            yield from _rows("XDP", found)
        except RoadtrainError as error:
            reason = str(error).strip().splitlines()[-1]
            yield Row(f"rate: no sums in the kernel: {reason}", "XDP", "packets/s", None)
    yield from processors.rows(bench.spec(computes=False))


def _rows(kind: str, found: dict[str, tuple[float, float]]) -> Iterator[Row]:
    for how, (ours, forwarded) in found.items():
        case, metric = "a switch in one core", f"{kind}, {how}"
        peer = (forwarded, "a plain forwarder")
        yield row(case, metric, "packets/s", ours, peer, more_is_better=True)


def _table_of(program: BpfObject) -> XdpTable:
    live = program.mapped("live", LIVE, MOST_JOBS)[:1]
    job = XdpJob(JOB, PORT, CHILDREN, 0, SLOTS, KEY, ("127.0.0.1", PORT), 0)
    table = XdpTable(program, "", job, live)
    live["found"] = 1  # makes the program send the sums to an address
    return table


def sealed(child: int, first: int, count: int, out: np.ndarray) -> None:
    """Write the headers and checksums of a child's `count` gradient packets to `out`, beside their
    payloads. `first`: number of the first packet.
    """
    packets.write_headers(
        out,
        PACKET_NBYTES,
        count,
        kind=Kind.GRADIENT,
        job=JOB,
        first=first,
        sender=child,
        width=4,
    )
    packets.seal(out, PACKET_NBYTES, count, KEY)


def forwarder() -> BpfObject:
    """Compile and load the plain forwarder."""
    with tempfile.TemporaryDirectory() as home:
        source = Path(shutil.copy(FORWARDER, home))
        made = source.with_suffix(".o")
        command = ["make", "--silent", f"--directory={PLUGIN}", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BpfError(f"make bpf: {(done.stderr.splitlines() or ['failed'])[0]}")
        return BpfObject(made)


def alone(what: str) -> float:
    """Measure the packets a second of the program in the kernel. `what`: "sum" for the switch,
    "forward" for the forwarder.
    """
    program = BpfObject(xdp.OBJECT) if what == "sum" else forwarder()
    table = _table_of(program) if what == "sum" else None
    descriptor = program.program("take_packet" if table else "forward")
    frame = np.zeros(34 + UDP_HEADER.size + PACKET_NBYTES, np.uint8)
    head = bytes(12) + bytes.fromhex("0800 4500") + (frame.size - 14).to_bytes(2) + bytes(4)
    head += bytes.fromhex("4011 0000 7f000001 7f000001")
    head += UDP_HEADER.pack(5, PORT, frame.size - 34, 0)
    nanoseconds, packet = 0, np.zeros(PACKET_NBYTES, np.uint8)
    for i in range(ALONE):
        sealed(i % CHILDREN, i // CHILDREN, 1, packet)
        frame[: len(head)], frame[len(head) :] = np.frombuffer(head, np.uint8), packet
        nanoseconds += program.run(descriptor, frame)[1]
    if table:
        counted = table.counters
        assert counted["completed"] == counted["added"] == ALONE // CHILDREN, counted
        table.close()
    program.close()
    return ALONE / nanoseconds * 1e9


# --- over a link ---


def _in_user_space(lab: Network, home: Path, seconds: float) -> dict[str, tuple[float, float]]:
    summed = _over_link(lab, home, user_space, sums=True, seconds=seconds)
    forwarded = _over_link(lab, home, user_space, sums=False, seconds=seconds)
    names = ("over a link", "its process alone")
    return dict(zip(names, zip(summed, forwarded, strict=True), strict=True))


def _in_kernel(lab: Network, home: Path, seconds: float) -> dict[str, tuple[float, float]]:
    bridges = LabHost("bridges", lab.home / "+switch", (), lab.hosts["switch"].names)
    ports = [host.nics[0].far.device for host in lab.hosts.values()]
    with running(pass_on, [{"ports": ports}], home, hosts=[bridges]) as (bridge,):
        bridge.wait_for("ready", START_S)
        summed, _ = _over_link(lab, home, in_kernel, sums=True, seconds=seconds)
        forwarded, _ = _over_link(lab, home, in_kernel, sums=False, seconds=seconds)
    return {"over a link": (summed, forwarded)}


def _over_link(
    lab: Network, home: Path, function: Callable[..., float], *, sums: bool, seconds: float
) -> tuple[float, float]:
    """Return packets a second: (over the link, of the processor time of the switch's process)."""
    switch, ends = lab.hosts["switch"], lab.hosts["ends"]
    with ExitStack() as stack:

        def start(function: Callable[..., Any], host: LabHost, **arguments: Any) -> Child:
            child = running(function, [arguments], home, hosts=[host])
            (process,) = stack.enter_context(child)
            process.wait_for("ready", START_S)
            return process

        process = start(function, switch, sums=sums, parent=ends.address)
        sender = start(send, ends, to=switch.address, seconds=seconds, sums=sums)
        sender.go_on()
        sent, took_s = sender.wait_for("result", START_S)
        process.go_on()
        spent_s = process.wait_for("result", START_S)
    return sent / took_s, sent / spent_s


def send(to: str, seconds: float, sums: bool) -> tuple[int, float]:
    """Send packets to a switch. Returns (number of packets sent, seconds until all had returned).

    Args:
        to: IP address of the switch
        seconds: duration of the measurement
        sums: the switch sums; otherwise, it forwards each packet
    """
    _use_one_core()
    end = DatagramSocket(("0.0.0.0", PORT), receive_nbytes=4 * MIB, send_nbytes=4 * MIB)
    trains = np.random.default_rng(1).integers(0, 256, (CHILDREN, RUN * PACKET_NBYTES), np.uint8)
    into = np.zeros(RECEIVE_NBYTES, np.uint8)
    back = RUN if sums else RUN * CHILDREN
    pause("ready")
    number, lost, begin = 0, 0, 0.0
    for warm in (True, False):
        begin, first = time.perf_counter(), number
        while time.perf_counter() < begin + (0.3 if warm else seconds):
            for child, train in enumerate(trains):
                sealed(child, number, RUN, train)
                end.send(train, PACKET_NBYTES, (to, PORT))
            number += RUN
            arrived = 0
            while arrived < back and (found := end.receive(into, WAIT_S)):
                arrived += found[0] // PACKET_NBYTES
            lost += back - arrived if not warm else 0
    elapsed = time.perf_counter() - begin
    sent = (number - first) * CHILDREN
    assert lost < sent / 100, f"{lost} packets of {sent} did not return"
    return sent, elapsed


def user_space(sums: bool, parent: str) -> float:
    """Switch packets until the parent process lets this process go on. Returns the processor
    seconds since the first packet.
    """
    _use_one_core()
    end = DatagramSocket(("0.0.0.0", PORT), receive_nbytes=4 * MIB, send_nbytes=4 * MIB)
    into, out = (np.zeros(RECEIVE_NBYTES, np.uint8) for _ in range(2))
    table, to = SwitchTable(SLOTS, CHILDREN), (parent, PORT)
    # compile before the first packet arrives
    packets.seal(out, PACKET_NBYTES, 1, KEY)
    right = packets.verify(out, PACKET_NBYTES, 1, KEY, JOB)
    table.add(out[:PACKET_NBYTES], right, into, 0)
    send_value("ready")
    begin = None
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(100):
            if (found := end.receive(into, WAIT_S)) is None:
                break
            begin = time.process_time() if begin is None else begin
            count, run = found[0] // PACKET_NBYTES, into[: found[0]]
            if not sums:
                end.send(run, PACKET_NBYTES, to)
                continue
            right = packets.verify(run, PACKET_NBYTES, count, KEY, JOB)
            if made := table.add(run, right, out, 0):
                packets.seal(out, PACKET_NBYTES, made, KEY)
                end.send(out[: made * PACKET_NBYTES], PACKET_NBYTES, to)
    return time.process_time() - (begin or 0.0)


def in_kernel(sums: bool, parent: str) -> float:
    """Let the kernel switch packets until the parent process lets this process go on. Returns
    infinity, because its processor time is not counted.
    """
    _use_one_core()
    greeting = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    greeting.sendto(b"here", (parent, PORT + 1))  # resolves the parent's hardware address
    time.sleep(0.2)
    if sums:
        device = XdpDevice.opened("eth0", "native")
        if isinstance(device, str):
            raise BpfError(device)
        hello = SwitchHello("", JOB, b"", CHILDREN, SLOTS, 0, (parent, PORT), 0)
        device.table(hello, PORT, KEY, hello.parent)
    else:
        program = forwarder()
        program.attach(program.program("forward"), socket.if_nametoindex("eth0"), NATIVE)
    pause("ready")
    return math.inf


def pass_on(ports: Sequence[str]) -> None:
    _use_one_core()
    program = forwarder()
    for port in ports:
        program.attach(program.program("pass"), socket.if_nametoindex(port), NATIVE)
    pause("ready")


def _use_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
