"""Item `rate` of `fanin`: measure the packets a second that the switch's table adds on one core, in
the kernel (XDP) and in user space. Each switch is compared with a plain forwarder of the same kind.

Two children send packets of int32. In the rows "alone", the kernel runs the program without a
device. In the rows "over a link", the sender, the switch and the receiver share one core and a link
of the lab. In the rows "its process alone", only the processor time of the switch's process counts,
including system calls.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Row
from roadtrain.lab import LabNic, Network, network_available
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
WAYS = {
    "XDP": "xdp-sum",
    "XDP forwarder": "xdp-forward",
    "user space": "user-sum",
    "user-space forwarder": "user-forward",
}


def run(seconds: float) -> dict[str, float] | str:
    """Return the packets a second of each switch and forwarder by name, or the reason why they
    cannot be measured. `seconds`: duration of each measurement.
    """
    if why := network_available():
        return f"no network: {why}"
    try:
        found = {"XDP, alone": alone("sum"), "XDP forwarder, alone": alone("forward")}
        with Network({name: [LabNic(RATE)] for name in ("switch", "ends")}) as lab:
            ports = [host.nics[0].far.device for host in lab.hosts.values()]
            with _process(_in_namespace(lab.home / "+switch"), "pass", *ports):
                for name, way in WAYS.items():
                    found |= _over_link(lab, name, way, seconds)
    except BpfError as error:
        return f"no sums in the kernel: {error}"
    return found


def rows(quick: bool) -> list[Row]:
    """Compare each switch with the forwarder of the same kind, or return a single row with the
    reason why they cannot be measured.
    """
    found = run(1.0 if quick else 5.0)
    if isinstance(found, str):
        return [Row(f"rate: {found}", "XDP", "packets/s", *[None] * 7)]  # type: ignore[arg-type]
    made = []
    for metric in [name for name in found if "forwarder" not in name]:
        peer_name = metric.replace("XDP", "XDP forwarder").replace(
            "user space", "user-space forwarder"
        )
        ours, peer = found[metric], found[peer_name]
        figures = (
            metric,
            "packets/s",
            ours,
            peer,
            "a plain forwarder",
            ours / peer,
            None,
            None,
            None,
        )
        made.append(Row("a switch in one core", *figures))
    return made


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


def _in_namespace(net: Path) -> Callable[..., subprocess.Popen[str]]:
    def run(argv: list[str], **popen: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(["nsenter", f"--net={net}", "--", *argv], **popen)

    return run


@contextmanager
def _process(
    starts: Callable[..., subprocess.Popen[str]], *words: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a child process of this module during the `with` block, and yield it when it is ready.

    Args:
        starts: function like subprocess.Popen, which runs the process on a host of the lab
        words: command-line arguments of this module
    """
    argv = [sys.executable, "-m", "benchmarks.fanin.xdp", *words]
    process = starts(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != "ready\n":
            raise BpfError(
                line.strip() or f"the process `{' '.join(words)}` ended before it was ready"
            )
        yield process
    finally:
        process.kill()
        process.communicate()


def _over_link(lab: Network, name: str, way: str, seconds: float) -> dict[str, float]:
    switch, ends = lab.hosts["switch"], lab.hosts["ends"]
    with _process(switch.run, way, ends.address) as process:
        with _process(ends.run, "ends", switch.address, str(seconds), way) as sender:
            report = json.loads(_answer(sender))
        process_s = float(_answer(process))
    found = {f"{name}, over a link": report["packets"] / report["seconds"]}
    if way.startswith("user"):
        found[f"{name}, its process alone"] = report["packets"] / process_s
    return found


def _answer(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate("go\n", timeout=START_S)
    return output.strip().splitlines()[-1]


def _ends(to: str, seconds: float, way: str) -> None:
    """Send packets to a switch, and print as JSON how many packets returned in how many seconds.

    Args:
        to: IP address of the switch
        seconds: duration of the measurement
        way: kind of the switch or forwarder: "xdp-sum", "xdp-forward", "user-sum" or "user-forward"
    """
    end = DatagramSocket(("0.0.0.0", PORT), receive_nbytes=4 * MIB, send_nbytes=4 * MIB)
    trains = np.random.default_rng(1).integers(0, 256, (CHILDREN, RUN * PACKET_NBYTES), np.uint8)
    into = np.zeros(RECEIVE_NBYTES, np.uint8)
    back = RUN if way.endswith("sum") else RUN * CHILDREN
    _ready()
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
    print(json.dumps({"packets": sent, "seconds": elapsed}), flush=True)


def _user_space(way: str, parent: str) -> None:
    end = DatagramSocket(("0.0.0.0", PORT), receive_nbytes=4 * MIB, send_nbytes=4 * MIB)
    into, out = (np.zeros(RECEIVE_NBYTES, np.uint8) for _ in range(2))
    table, to = SwitchTable(SLOTS, CHILDREN), (parent, PORT)
    # compile before the first packet arrives
    packets.seal(out, PACKET_NBYTES, 1, KEY)
    right = packets.verify(out, PACKET_NBYTES, 1, KEY, JOB)
    table.add(out[:PACKET_NBYTES], right, into, 0)
    _ready()
    begin = None
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(100):
            if (found := end.receive(into, WAIT_S)) is None:
                break
            begin = time.process_time() if begin is None else begin
            count, run = found[0] // PACKET_NBYTES, into[: found[0]]
            if way == "user-forward":
                end.send(run, PACKET_NBYTES, to)
                continue
            right = packets.verify(run, PACKET_NBYTES, count, KEY, JOB)
            if made := table.add(run, right, out, 0):
                packets.seal(out, PACKET_NBYTES, made, KEY)
                end.send(out[: made * PACKET_NBYTES], PACKET_NBYTES, to)
    print(time.process_time() - (begin or 0.0))


def _in_kernel(way: str, parent: str) -> None:
    greeting = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    greeting.sendto(b"here", (parent, PORT + 1))  # resolves the parent's hardware address
    time.sleep(0.2)
    if way == "xdp-forward":
        program = forwarder()
        program.attach(program.program("forward"), socket.if_nametoindex("eth0"), NATIVE)
    else:
        device = XdpDevice.opened("eth0", "native")
        if isinstance(device, str):
            raise BpfError(device)
        hello = SwitchHello("", JOB, b"", CHILDREN, SLOTS, 0, (parent, PORT), 0)
        device.table(hello, PORT, KEY, hello.parent)
    _ready()
    sys.stdin.readline()
    print(0.0)


def _pass(*ports: str) -> None:
    program = forwarder()
    for port in ports:
        program.attach(program.program("pass"), socket.if_nametoindex(port), NATIVE)
    _ready()
    sys.stdin.read()


def _ready() -> None:
    print("ready", flush=True)


def _main(way: str, *words: str) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if way == "pass":
        _pass(*words)
    elif way == "ends":
        _ends(words[0], float(words[1]), words[2])
    elif way.startswith("user"):
        _user_space(way, *words)
    else:
        _in_kernel(way, *words)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except BpfError as problem:
        print(problem, flush=True)
        sys.exit(1)
