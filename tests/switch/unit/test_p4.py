"""switch.p4 of plugins/switch_offload: the program's source, run by a translator (p4_reader.py,
p4_machine.py), does on random packets what switch/protocol/switch.py does; p4c and bmv2 are not
needed."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roadtrain_switch_offload
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.switch.packets import HEADER, HEADER_NBYTES, MAGIC, VERSION, Kind
from roadtrain.switch.protocol.numbered import Heartbeat
from roadtrain.switch.protocol.switch import Packet, SwitchStateMachine
from roadtrain_switch_offload.p4_entries import P4Job, P4Neighbour, entries
from tests.support.p4_machine import Entries, Machine
from tests.support.p4_reader import P4Error, read

SOURCE = Path(roadtrain_switch_offload.__file__).with_name("switch.p4").read_text()
FORMS = ((Kind.GRADIENT, 4), (Kind.GRADIENT, 2), (Kind.EXPONENTS, 0), (Kind.GRADIENT, 1))
SLOTS, CHILD, CONTROL_PORT = 8, 3, 255


def job(number: int = 77, children: int = 3, udp: int = 9001, slots: int = SLOTS) -> P4Job:
    return P4Job(
        job=number,
        host="10.1.0.1",
        udp=udp,
        mac="02:00:00:00:00:01",
        child=CHILD,
        slots=slots,
        parent=P4Neighbour(100, "02:00:00:00:00:02", "10.1.0.2", 700),
        children=tuple(
            P4Neighbour(10 + n, f"02:00:00:00:01:{n:02x}", f"10.1.1.{n}", 800 + n)
            for n in range(children)
        ),
    )


def number_of(field: Any) -> int:
    if isinstance(field, int):
        return field
    return int(field.replace(":", ""), 16) if ":" in field else int(IPv4Address(field))


def machine(*jobs: P4Job, payload_nbytes: int = 256, source: str = SOURCE) -> Machine:
    """A newly started switch with the control plane's entries, passed through JSON."""
    config = json.loads(json.dumps(entries(jobs)))
    program = read(source, {"PAYLOAD_BITS": 8 * payload_nbytes})
    found = Entries()
    for entry in config["table_entries"]:
        control, table = entry["table"].split(".")
        key = tuple(number_of(value) for value in entry["match"].values())
        action = entry["action_name"].removeprefix(f"{control}.")
        parameters = program.controls[control].actions[action][0]
        assert [name for _, name in parameters] == list(entry["action_params"])
        assert len(key) == len(program.controls[control].tables[table].keys)
        values = [number_of(value) for value in entry["action_params"].values()]
        found.tables.setdefault(entry["table"], {})[key] = (action, values)
    for group in config["multicast_group_entries"]:
        found.groups[group["multicast_group_id"]] = [
            (copy["egress_port"], copy["instance"]) for copy in group["replicas"]
        ]
    return Machine(program, found)


def frame(
    packet: bytes, of: P4Job, to: P4Neighbour | None = None, source: str = "9.9.9.9"
) -> bytes:
    """An Ethernet frame to the switch or, with `to`, from the switch."""
    mac, host, udp = (to.mac, to.host, to.udp) if to else (of.mac, of.host, of.udp)
    hops = bytes.fromhex(mac.replace(":", "")), bytes.fromhex(of.mac.replace(":", ""))
    if not to:
        hops = (hops[0], bytes(6))
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 28 + len(packet), 7, 0x4000, 64, 17, 0,
        IPv4Address(of.host if to else source).packed, IPv4Address(host).packed,
    )  # fmt: skip
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    check = struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF)
    ports = struct.pack("!HHHH", of.udp if to else 5, udp, 8 + len(packet), 0)
    return b"".join((*hops, b"\x08\x00", ip[:10], check, ip[12:], ports, packet))


def packet(of: P4Job, number: int, sender: int, payload: bytes = b"", **fields: int) -> bytes:
    kind, width = FORMS[number % len(FORMS)]
    made = np.zeros(1, HEADER)
    header = {"magic": MAGIC, "version": VERSION, "kind": kind, "job": of.job, "number": number}
    for name, value in (header | {"sender": sender, "width": width} | fields).items():
        made[name] = value
    return made.tobytes() + payload


def added(width: int, first: bytes, second: bytes) -> bytes:
    pair = [np.frombuffer(payload, f"<i{width}") for payload in (first, second)]
    return (pair[0] + pair[1]).tobytes()


def greater(first: bytes, second: bytes) -> bytes:
    return np.maximum(*(np.frombuffer(payload, np.uint8) for payload in (first, second))).tobytes()


OPS = [partial(added, width) if width else greater for _, width in FORMS]


def run_beside(steps: int, payload_nbytes: int, seed: int, source: str = SOURCE) -> Counter[str]:
    """Send random packets (late, repeated, some acknowledged) through switches that restart, and
    assert that the program sends the same packets as the state machine. Returns counts of
    events."""
    rng, of, seen = random.Random(seed), job(), Counter[str]()
    switch = machine(of, payload_nbytes=payload_nbytes, source=source)
    model, base = SwitchStateMachine(SLOTS, len(of.children), CHILD), 1 << 40
    for _ in range(steps):
        if rng.random() < 0.01:
            seen["restart"] += 1
            switch = machine(of, payload_nbytes=payload_nbytes, source=source)
            model = SwitchStateMachine(SLOTS, len(of.children), CHILD)
        if rng.random() < 0.05:
            base += rng.randrange(4)
            if rng.random() < 0.5:  # the switch sees the acknowledgement
                seen["beat"] += 1
                model.parent_beat(Heartbeat(base, base + SLOTS - 1))
                beat = packet(of, base, 0, kind=Kind.GRADIENT_BEAT, width=0)
                assert len(switch.packet(frame(beat, of), of.parent.port)) == len(of.children)
        number = base + rng.randrange(-SLOTS, SLOTS)
        child = rng.randrange(len(of.children))
        payload = random.Random(f"{number} {child}").randbytes(payload_nbytes)
        fields = {"a": number % 3, "credit": number % 5, "tag": 99}
        sent = frame(packet(of, number, child, payload, **fields), of)
        got = switch.packet(sent, of.children[child].port)
        total = model.packet(Packet(number, payload, OPS[number % len(OPS)], child))
        expected = []
        if total is not None:
            whole = packet(of, number, total.child, total.data, **(fields | {"tag": 0}))
            expected.append((of.parent.port, frame(whole, of, of.parent)))
        assert got == expected
        seen["sum" if got else "nothing"] += 1
    counts = switch.stages["ingress"].held["outcomes"].counts
    seen["late"] = counts[2]
    return seen


@pytest.mark.parametrize("payload_nbytes", [256, 1408])
@pytest.mark.slow
def test_the_program_equals_the_state_machine(payload_nbytes: int) -> None:  # Rule 7
    """A real switch could take 256 bytes per packet; the ends send 1408."""
    seen = run_beside(2000, payload_nbytes, seed=payload_nbytes)
    assert min(seen[what] for what in ("restart", "beat", "sum", "nothing", "late")) > 5, seen


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("^ ((total ^ with) & high)", ""),
        ("(chosen >> 7) * 255", "(chosen >> 6) * 255"),
        ("meta.number < ack || ", ""),  # L10: a resend starts a new sum
        ("(bits != 0 && meta.number < number)", "bits == 0"),
        ("if (meta.number > number || bits == 0)", "if (bits == 0)"),
        ("(bits & meta.who) != 0", "false_bits != 0"),
        ("if (width == 4) {", "if (width == 3) {"),
        ("hdr.head.number[63:56];", "hdr.head.number[55:48];"),
        ("meta.job.child[7:0] ++ meta.job.child[15:8]", "meta.job.child"),
    ],
)
@pytest.mark.slow
def test_a_broken_program_is_found(right: str, wrong: str) -> None:
    assert SOURCE.count(right) == 1
    broken = SOURCE.replace(right, wrong).replace("false_bits != 0", "meta.who == 0")
    with pytest.raises(AssertionError):
        run_beside(1500, 256, seed=256, source=broken)


def test_parameters_are_copied_to_all_children_and_heartbeats_go_to_software() -> None:
    of = job()
    switch = machine(of)
    for kind in (Kind.PARAMETERS, Kind.MAXIMA, Kind.GRADIENT_BEAT):
        down = packet(of, 5, 0, b"what the parent says", kind=kind, width=0)
        copies = [(child.port, frame(down, of, child)) for child in of.children]
        assert switch.packet(frame(down, of), of.parent.port) == copies
        # nobody else can impersonate the parent
        assert [to for to, _ in switch.packet(frame(down, of), 10)] == [CONTROL_PORT]
    beat = frame(packet(of, 5, 1, kind=Kind.PARAMETER_BEAT, width=0), of)
    assert switch.packet(beat, 11) == [(CONTROL_PORT, beat)]


def test_strangers_change_nothing() -> None:  # Rule 8
    of, payload = job(), bytes(256)
    switch = machine(of)
    up = packet(of, 0, 1, payload)
    assert switch.packet(frame(up, of), 10) == []  # child 1 is at port 11
    assert switch.packet(frame(packet(of, 0, 9, payload), of), 11) == []  # no such child
    other = packet(job(78), 0, 1, payload)
    assert switch.packet(frame(other, of), 11) == []  # belongs to no job, and `forward` is empty
    for cut in range(0, len(frame(up, of)), 7):
        switch.packet(frame(up, of)[:cut], 11)
    assert not any(cell.value for cell in switch.stages["ingress"].held["came"].cells)
    switch.entries.tables["Ingress.forward"] = {(0x020000000001,): ("to_port", [42])}
    plain = frame(b"something else", of)
    assert switch.packet(plain, 11) == [(42, plain)]


def test_jobs_do_not_touch_each_other() -> None:
    first, second = job(), job(78, children=1, udp=9002, slots=16)
    switch = machine(first, second)
    payload = bytes(range(256))
    for child in range(2):
        assert switch.packet(frame(packet(first, 3, child, payload), first), 10 + child) == []
    ((port, got),) = switch.packet(frame(packet(second, 3, 0, payload), second), 10)
    assert port == 100 and got[-256:] == payload
    assert len(switch.packet(frame(packet(first, 3, 2, payload), first), 12)) == 1
    arrivals = switch.stages["ingress"].held["came"].cells
    assert [slot for slot, cell in enumerate(arrivals) if cell.value] == [3, SLOTS + 3]


def test_a_former_jobs_slots_are_reset() -> None:
    resets = entries([job(), job(78, udp=9002, slots=16)])["register_resets"]
    assert [
        (reset["first"], reset["count"]) for reset in resets if reset["register"] == "Ingress.came"
    ] == [
        (0, SLOTS),
        (SLOTS, 16),
    ]
    names = {f"Ingress.{name}" for name in machine(job()).stages["ingress"].held}
    assert {reset["register"] for reset in resets} <= names


def test_invalid_entries_are_refused() -> None:
    with pytest.raises(ConfigError, match="power of two"):
        job(slots=12)
    with pytest.raises(ConfigError, match="65 children"):
        job(children=65)
    with pytest.raises(BudgetError, match="2 jobs need 8192 slots"):
        entries([job(slots=4096), job(78, udp=1, slots=4096)])
    with pytest.raises(ConfigError, match="two jobs have the same host, UDP port and job number"):
        entries([job(), job()])


def test_the_translator_refuses_programs_that_the_language_forbids() -> None:
    of = job()
    up = frame(packet(of, 0, 0, bytes(256)), of)
    for right, wrong, why in (
        ("slot = meta.job.base +", "slot = meta.number +", "bit<32> where bit<64>"),
        ("bits = bits | meta.who", "bits = bits | meta.job.child", "bit<16> where bit<64>"),
        ("hdr.head.tag = 0;", "hdr.nothing.tag = 0;", "nothing"),
        ("outcome = ADDED;", "outcome = 4294967296;", "more than bit<32> holds"),
        ("outcome = ADDED;", "outcome := ADDED;", "unexpected"),
    ):
        assert right in SOURCE
        with pytest.raises((P4Error, KeyError), match=why):
            switch = machine(job(children=1), source=SOURCE.replace(right, wrong))
            switch.packet(up, 10)
    assert len(frame(b"", of)) == 42 and HEADER_NBYTES == 48
