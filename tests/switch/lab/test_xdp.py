"""xdp.py of plugins/switch_offload: the switch's table in the kernel, on hosts of the lab. Packets
of real sockets are summed, even if some are lost, repeated or joined into trains. A program that is
broken or was built from other sources is not used, and no program stays attached."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from roadtrain.errors import BudgetError, ConfigError, LostError
from roadtrain.lab import LabHost, LabNic, Network, network_available
from roadtrain.switch import packets
from roadtrain.switch.packets import HEADER, HEADER_NBYTES, PACKET_NBYTES, Kind, PacketKey
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain_switch_offload import xdp
from roadtrain_switch_offload.bpf_object import NATIVE, BpfError, BpfObject
from roadtrain_switch_offload.xdp import XdpDevice
from roadtrain_switch_offload.xdp_table import MOST_JOBS, XdpTable
from roadtrain_switch_offload.xdp_trial import failed_trial
from tests.support.host_thread import HostThread
from tests.support.needs import needs, no_xdp

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins/switch_offload"
PATHS = (ROOT / "src", PLUGIN / "src")
SOURCE, BUILT = xdp.OBJECT.with_suffix(".c"), xdp.OBJECT.with_suffix(".sha256")
needs_clang = needs("clang", "llvm-strip", "make", apt="clang llvm libbpf-dev make")
JOB, PORT, PARENT_PORT, CHILD = 77, 9001, 9002, 5
KEY = PacketKey.derive(b"token", b"nonce")
CHILDREN = 3
FORMS = ((Kind.GRADIENT, 4), (Kind.GRADIENT, 2), (Kind.EXPONENTS, 0), (Kind.GRADIENT, 1))
UDP_SEGMENT = 103


@pytest.fixture(scope="module", autouse=True)
def needs_xdp() -> None:
    with HostThread(None) as nowhere:
        device = nowhere.do(XdpDevice.opened, "lo")
        if isinstance(device, str):
            no_xdp(device)
        device.close()


def payload(number: int, child: int) -> np.ndarray:
    return np.random.default_rng([number, child]).integers(0, 256, packets.PAYLOAD_NBYTES, np.uint8)


def packet(number: int, child: int, key: PacketKey = KEY, job: int = JOB) -> np.ndarray:
    kind, width = FORMS[number % len(FORMS)]
    data = np.zeros(PACKET_NBYTES, np.uint8)
    packets.write_headers(
        data, PACKET_NBYTES, 1, kind=kind, job=job, first=number, sender=child, width=width
    )
    data[HEADER_NBYTES:] = payload(number, child)
    packets.seal(data, PACKET_NBYTES, 1, key)
    return data


def expected(number: int, children: int = CHILDREN) -> bytes:
    """Compute the payload of a sum with numpy."""
    kind, width = FORMS[number % len(FORMS)]
    each = np.stack([payload(number, child) for child in range(children)])
    if kind == Kind.EXPONENTS:
        return each.max(axis=0).tobytes()
    return each.view(f"<i{width}").sum(axis=0, dtype=f"<i{width}").tobytes()


def hello_of(children: int, child: int, slots: int) -> SwitchHello:
    return SwitchHello("", JOB, b"", children, slots, child, ("", 0), 0)


class Scene:
    """Children, a switch and its parent, each on a separate host. The switch's user space is a loop
    in `poll`."""

    def __init__(self, network: Network, stack: contextlib.ExitStack, mode: xdp.Mode) -> None:
        self.hosts, self.mode = network.hosts, mode
        threads = {
            name: stack.enter_context(HostThread(host.net)) for name, host in self.hosts.items()
        }
        self.switch = threads["switch"]
        if mode == "native":  # a veth carries packets sent by a program only if its peer runs NAPI
            stack.callback(_pass_on_ports(network))
        device = self.switch.do(XdpDevice.opened, "eth0")
        assert isinstance(device, XdpDevice), device
        assert device.mode == mode
        stack.callback(device.close)
        self.device = device
        ports = {"switch": PORT, "parent": PARENT_PORT}
        self.sockets = {}
        for name, thread in threads.items():
            end = thread.do(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
            stack.enter_context(end)
            end.bind((self.hosts[name].address, ports.get(name, 0)))
            end.settimeout(10)
            with contextlib.suppress(PermissionError):
                end.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
            self.sockets[name] = end
        self.to = (self.hosts["switch"].address, PORT)
        self.passed: list[bytes] = []  # packets that reached the switch's user space

    def table(self, slots: int = 64, children: int = CHILDREN, resolved: bool = True) -> XdpTable:
        """resolved: The switch's host has resolved the parent's hardware address."""
        parent = (self.hosts["parent"].address, PARENT_PORT)
        table = self.switch.do(
            lambda: self.device.table(hello_of(children, CHILD, slots), PORT, KEY, parent)
        )
        if resolved:  # as heartbeats do
            self.sockets["switch"].sendto(b"here", parent)
            assert self.sockets["parent"].recv(10) == b"here"
            self.switch.do(table.look)
        return table

    def send(self, child: int, *each: np.ndarray) -> None:
        for data in each:
            self.sockets[f"c{child}"].sendto(data, self.to)

    def send_train(self, child: int, each: list[np.ndarray]) -> None:
        end = self.sockets[f"c{child}"]
        end.setsockopt(socket.SOL_UDP, UDP_SEGMENT, PACKET_NBYTES)
        end.sendto(np.concatenate(each), self.to)
        end.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 0)

    def poll(self, table: XdpTable, wait_s: float = 2.0) -> dict[int, bytes]:
        """Run user space and return the sums at the parent, until no packet arrives for
        `wait_s`."""
        sums: dict[int, bytes] = {}
        ends = [self.sockets["switch"], self.sockets["parent"]]
        while ready := select.select(ends, [], [], wait_s)[0]:
            if ends[0] in ready:
                self._user_space(table, ends[0].recv(1 << 16))
            if ends[1] in ready:
                number, data = self._sum(ends[1].recv(1 << 16))
                assert sums.setdefault(number, data) == data
        return sums

    def _user_space(self, table: XdpTable, got: bytes) -> None:
        self.passed.append(got)
        data, out = np.frombuffer(got, np.uint8), np.zeros(PACKET_NBYTES, np.uint8)
        ok = packets.verify(data, len(got), 1, KEY, JOB)
        bulk = len(got) == PACKET_NBYTES and ok[0]
        if bulk and table.add(data, ok, out, CHILD):
            packets.seal(out, PACKET_NBYTES, 1, KEY)
            self.sockets["switch"].sendto(out, self.sockets["parent"].getsockname())

    def _sum(self, got: bytes) -> tuple[int, bytes]:
        data = np.frombuffer(got, np.uint8)
        assert packets.verify(data, len(got), 1, KEY, JOB)[0]
        header = data[:HEADER_NBYTES].view(HEADER)[0]
        assert header["sender"] == CHILD
        return int(header["number"]), got[HEADER_NBYTES:]


def _pass_on_ports(network: Network) -> contextlib.ExitStack.close:
    """Attach the program to the far end of each NIC, where it has no jobs and passes all
    packets."""
    closed = contextlib.ExitStack()
    with HostThread(network.home / "+switch") as ports:
        program = BpfObject(xdp.OBJECT)
        closed.callback(program.close)
        for host in network.hosts.values():
            interface = ports.do(socket.if_nametoindex, host.nics[0].far.device)
            link = ports.do(program.attach, program.program("take_packet"), interface, NATIVE)
            closed.callback(os.close, link)
    return closed.close


@contextlib.contextmanager
def network() -> Iterator[Network]:
    names = ("switch", "parent", *(f"c{child}" for child in range(CHILDREN)))
    with Network({name: [LabNic(50e6)] for name in names}) as lab:
        yield lab


@pytest.fixture(params=["generic", pytest.param("native", marks=pytest.mark.exhaustive)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with network() as lab, contextlib.ExitStack() as stack:
        yield Scene(lab, stack, request.param)


def test_sums_of_packets_from_three_hosts(scene: Scene) -> None:  # Rule 1
    table = scene.table()
    for number in range(64):
        for child in range(CHILDREN):
            scene.send(child, packet(number, child))
    sums = scene.poll(table)
    assert sums == {number: expected(number) for number in range(64)}
    assert table.counters["completed"] == 64
    assert scene.passed == []  # no packet reached user space
    assert table.counters["handed_up"] == 0
    table.close()


def test_loss_and_repetition_make_no_wrong_sum(scene: Scene) -> None:
    """A window of 8 slides over 200 numbers; of every ten packets three are lost and two are
    repeated. Greater numbers take over slots while late packets arrive."""
    table, rng = scene.table(slots=8), random.Random(3)
    got: dict[int, bytes] = {}
    ack, sent = 0, []
    while ack < 200:
        for number in range(ack, min(ack + 8, 200)):
            for child in range(CHILDREN):
                if rng.random() < 0.7:
                    sent.append((child, packet(number, child)))
                    scene.send(*sent[-1])
                if rng.random() < 0.2:
                    scene.send(*rng.choice(sent[-300:]))
        for number, data in scene.poll(table, 0.01).items():
            if rng.random() < 0.7:  # else the sum is lost
                assert got.setdefault(number, data) == data
        while ack in got:
            ack += 1
        if rng.random() < 0.7:  # else the heartbeat is lost
            scene.switch.do(table.snoop, ack)
    assert got == {number: expected(number) for number in range(200)}
    counters = table.counters
    assert min(counters[name] for name in ("dropped_old", "repeated", "answered")) > 0
    table.close()


@pytest.mark.exhaustive
def test_packets_on_several_processors_at_once_are_summed(scene: Scene) -> None:
    """The program runs on the sender's processor with a veth; each packet is sent twice."""
    table, cpus = scene.table(), sorted(os.sched_getaffinity(0))
    numbers = range(64)
    trains = [[packet(number, child) for number in numbers] for child in range(CHILDREN)]
    start = threading.Barrier(CHILDREN)

    def send(child: int) -> None:
        os.sched_setaffinity(0, {cpus[child % len(cpus)]})  # of this thread
        start.wait(10)
        for data in trains[child]:
            scene.send(child, data, data)

    threads = [threading.Thread(target=send, args=(child,)) for child in range(CHILDREN)]
    for thread in threads:
        thread.start()
    sums = scene.poll(table)
    for thread in threads:
        thread.join(10)
    sums |= scene.poll(table)
    assert sums == {number: expected(number) for number in numbers}
    counters = table.counters
    assert counters["completed"] == 64 and counters["added"] == 64 * (CHILDREN - 1)
    assert counters["repeated"] + counters["answered"] == 64 * CHILDREN
    table.close()


def test_trains_of_packets_are_summed(scene: Scene) -> None:
    """Segmentation offload joins packets into trains. In native mode the kernel splits a train
    before the program runs; in generic mode user space receives it, and both use the same table."""
    table = scene.table()
    for child in range(CHILDREN - 1):
        scene.send_train(child, [packet(number, child) for number in range(40)])
    scene.send(CHILDREN - 1, *(packet(number, CHILDREN - 1) for number in range(40)))
    sums = scene.poll(table)
    assert sums == {number: expected(number) for number in range(40)}
    trains = 0 if scene.mode == "native" else 40 * (CHILDREN - 1)
    assert len(scene.passed) == trains
    table.close()


def test_strangers_change_nothing(scene: Scene) -> None:  # Rule 8
    table = scene.table()
    other = PacketKey.derive(b"another token", b"nonce")
    forged = packet(0, 1)
    forged[700] ^= 1
    strange = [packet(0, 1, other), packet(0, 1, KEY, JOB + 1), forged, np.zeros(1456, np.uint8)]
    scene.send(1, *strange)
    beat = np.zeros(HEADER_NBYTES, np.uint8)
    packets.write_headers(beat, HEADER_NBYTES, 1, kind=Kind.PARAMETER_BEAT, job=JOB, first=0)
    packets.seal(beat, HEADER_NBYTES, 1, KEY)
    scene.send(2, beat)
    assert scene.poll(table) == {}
    # all of them reach user space unchanged
    assert sorted(scene.passed) == sorted(data.tobytes() for data in (*strange, beat))
    assert set(table.counters.values()) == {0}
    for child in range(CHILDREN):
        scene.send(child, packet(0, child))
    assert scene.poll(table) == {0: expected(0)}
    scene.send(0, packet(1, CHILDREN))  # the right tag, but no such child
    assert scene.poll(table) == {} and table.counters["mismatched"] == 1
    table.close()


@pytest.mark.parametrize("slots", [pytest.param(8, marks=pytest.mark.exhaustive), 1000])
def test_stuck_sums_name_the_missing_children(scene: Scene, slots: int) -> None:
    table = scene.table(slots=slots)
    table.now = 100
    scene.send(1, packet(3, 1))
    for child in range(CHILDREN):
        scene.send(child, packet(4, child))
    scene.poll(table)
    table.now = 110
    for number in range(slots - 3, slots):
        scene.send(2, packet(number, 2))
    scene.poll(table)
    late = [(slot.number, slot.missing) for slot in table.stuck() if slot.age == 0]
    assert late == [(number, (0, 1)) for number in range(slots - 3, slots)]
    table.now = 130
    (stuck,) = table.stuck(30)
    assert (stuck.number, stuck.missing, stuck.age) == (3, (0, 2), 30)
    assert table.stuck(31) == []
    scene.switch.do(table.snoop, slots)
    assert table.stuck() == []
    table.close()


def test_without_the_parents_hardware_address_user_space_sends(scene: Scene) -> None:
    table = scene.table(resolved=False)
    for child in range(CHILDREN):
        scene.send(child, packet(0, child))
    assert scene.poll(table) == {0: expected(0)}
    assert table.counters["handed_up"] == 1
    table.close()


@pytest.mark.exhaustive
def test_jobs_are_isolated_and_end_separately(scene: Scene) -> None:
    first = scene.table(children=1)
    second = scene.device.table(hello_of(1, 0, 4), PORT + 1, KEY, ("127.0.0.1", 5))
    with pytest.raises(ConfigError, match="has a job on port"):
        scene.table()
    scene.send(0, packet(0, 0))
    assert scene.poll(first) == {0: expected(0, 1)}
    assert second.counters["completed"] == 0
    first.close()
    first.close()
    scene.send(0, packet(1, 0))
    # the packet reaches user space again
    assert scene.sockets["switch"].recv(1 << 16) == packet(1, 0).tobytes()
    out = np.zeros(PACKET_NBYTES, np.uint8)
    assert second.add(packet(0, 0), np.ones(1, bool), out, 0) == 1
    with pytest.raises(LostError, match="closed"):
        first.add(packet(0, 0), np.ones(1, bool), out, CHILD)
    again = scene.table(children=1)  # its table is empty
    scene.send(0, packet(0, 0))
    assert scene.poll(again) == {0: expected(0, 1)}
    assert again.counters["completed"] == 1
    again.close()
    second.close()


def test_a_device_refuses_more_than_the_maximum_of_jobs() -> None:  # Rule 4
    with HostThread(None) as nowhere:
        device = nowhere.do(XdpDevice.opened, "lo")

        def table(port: int) -> XdpTable:
            return device.table(hello_of(1, 0, 1), port, KEY, ("127.0.0.1", 5))

        tables = [nowhere.do(table, 100 + n) for n in range(MOST_JOBS)]
        with pytest.raises(BudgetError, match=f"has {MOST_JOBS} jobs already, the maximum"):
            nowhere.do(table, 99)
        tables.pop().close()
        tables.append(nowhere.do(table, 99))
        for open_table in tables:
            open_table.close()
        device.close()


def test_the_program_ends_with_its_process() -> None:
    program = "from roadtrain_switch_offload.xdp import XdpDevice\nimport time\n"
    program += "print(XdpDevice.opened('eth0').mode, flush=True)\ntime.sleep(60)\n"
    with network() as lab:
        host = lab.hosts["switch"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
        process = host.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env
        )
        assert process.stdout
        assert process.stdout.readline() == "generic\n"
        assert "xdpgeneric" in shown(host)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        assert "xdp" not in shown(host)


def shown(host: LabHost) -> str:
    return host.nics[0].near.do("ip", "link show dev eth0")


def built(folder: Path, text: str) -> Path:
    """The object file of a program with this source, built as `make bpf` builds the shipped
    file."""
    source = folder / SOURCE.name
    source.write_text(text)
    target = source.with_suffix(".o")
    subprocess.run(["make", "--silent", f"--directory={PLUGIN}", str(target)], check=True)
    return target


@needs_clang
def test_the_shipped_program_matches_its_source(tmp_path: Path) -> None:
    """Byte for byte with the clang that built it; through the self-test with any other clang."""
    rebuilt = built(tmp_path, SOURCE.read_text())
    program = BpfObject(rebuilt)
    assert failed_trial(program) is None
    program.close()
    here, shipped = (
        path.read_text().splitlines() for path in (rebuilt.with_suffix(".sha256"), BUILT)
    )
    if here[0] == shipped[0]:
        assert rebuilt.read_bytes() == xdp.OBJECT.read_bytes()
        assert here == shipped


@needs_clang
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("^ ((x ^ y) & high)", ""),  # elements that overflow
        ("(x & mask) | (y & ~mask)", "(y & mask) | (x & ~mask)"),  # the least exponent
        (
            "		entry->came = 0;\n",
            "",
        ),  # a greater number inherits the children of the former number
        ("if (entry->came & bit)", "if (0)"),  # a resend is added twice
        ("if (head->number < entry->number)", "if (0)"),  # L10: a late packet takes the slot
        ("head->tag != tag_of(packet, job)", "0"),  # packets of strangers are accepted
        ("if (head->number < (*now)->acked)", "if (0)"),  # L10: a resend restarts a sum
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in (
                ("packet->head.sender = job->child", "packet->head.sender = 0"),
                ("ip->check = ~checksum", "ip->check = checksum"),
            )
        ),
    ],
)
def test_the_self_test_refuses_a_broken_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    text = SOURCE.read_text()
    assert text.count(right) == 1
    monkeypatch.setattr(xdp, "OBJECT", built(tmp_path, text.replace(right, wrong)))
    with network() as lab, HostThread(lab.hosts["switch"].net) as switch:
        message = switch.do(XdpDevice.opened, "eth0")
        assert isinstance(message, str) and "the self-test of the program failed" in message
        assert "summing in user space" in message and "\n" not in message
        assert "xdp" not in shown(lab.hosts["switch"])


def test_a_missing_device_is_named_in_one_line() -> None:  # Rule 6
    assert XdpDevice.opened("no-such-device") == (
        "no sums in the kernel on no-such-device: there is no such device; summing in user space"
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the shipped object, beside copies of its source and its checksums."""
    for path in (SOURCE, xdp.OBJECT, BUILT):
        shutil.copy(path, tmp_path)
    return tmp_path / xdp.OBJECT.name


@pytest.mark.parametrize("changed", [".c", ".o", ".sha256"])
def test_an_object_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, copied: Path, changed: str
) -> None:  # Rule 6
    BpfObject(copied).close()
    path = copied.with_suffix(changed)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(BpfError, match=r"bpf\.o is not built from this .*\.bpf\.c; run `make bpf`"):
        BpfObject(copied)
    monkeypatch.setattr(xdp, "OBJECT", copied)
    with HostThread(None) as nowhere:
        message = nowhere.do(XdpDevice.opened, "lo")
    assert "run `make bpf`; summing in user space" in message and "\n" not in message
    path.unlink()
    with pytest.raises(BpfError, match=f"cannot read {path}"):
        BpfObject(copied)


@needs_clang
def test_a_program_refused_by_the_kernel_is_an_error(tmp_path: Path) -> None:
    endless = (
        '__attribute__((section("xdp"))) int f(void *c) { for (;;) asm volatile(""); return 2; }'
    )
    with pytest.raises(BpfError, match="the kernel refused to load"):
        BpfObject(built(tmp_path, endless))


def test_a_device_with_a_program_is_refused() -> None:
    with HostThread(None) as nowhere:
        first = nowhere.do(XdpDevice.opened, "lo")
        message = nowhere.do(XdpDevice.opened, "lo")
        assert isinstance(message, str) and "attach a program" in message
        first.close()
        again = nowhere.do(XdpDevice.opened, "lo")
        assert isinstance(again, XdpDevice)
        again.close()
