"""The table of a switch in the kernel: xdp_switch.bpf.c on a network device, and its jobs.

    XdpDevice.opened("eth0")    the program, tried (xdp_trial.py) and attached; or a line: why not
      .table(...) -> XdpTable   a job's, in place of switch/switch_table.py's SwitchTable

The kernel takes what it can (the head of the C file says what) and sends the sums itself, as soon
as this host knows the parent's hardware address. What reaches user space all the same,
`XdpTable.add` hands to the program, so there is one table. The program is detached by `close`, and
by the end of the process in whatever way. Heartbeats and parameters are user space's.

Note "Modes". Native runs in the device's driver, before the kernel makes a buffer of the packet;
generic after, on every device, and there a train of packets that segmentation offload has joined is
one packet, which user space takes apart. A veth's driver throws away, without a word, what a
program sends unless the other end runs NAPI (as it does with a program of its own, or GRO on); so
on a device without hardware a few frames are sent on trial, and generic mode is taken where they do
not leave.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from roadtrain.errors import BudgetError, ConfigError
from roadtrain.switch.packets import PacketKey
from roadtrain.switch.switch_frames import SwitchHello
from roadtrain.transport.tcp import Address
from roadtrain_switch_offload.bpf_object import GENERIC, NATIVE, BpfError, BpfObject
from roadtrain_switch_offload.next_hop import hardware_address, is_hardware
from roadtrain_switch_offload.xdp_table import LIVE, MOST_JOBS, XdpJob, XdpTable
from roadtrain_switch_offload.xdp_trial import failed_trial

Mode = Literal["auto", "native", "generic"]
SOURCE = Path(__file__).with_name("xdp_switch.bpf.c")
TRIALS, TRIAL_NBYTES, TRIAL_S = 64, 60, 0.3  # frames sent on trial
EXPERIMENT = bytes.fromhex("88b5")  # the EtherType that IEEE 802 leaves for local experiments
SENT_COLUMN = 9  # of /proc/net/dev: packets sent


class XdpDevice:
    """The program on one device, for all jobs of this process."""

    def __init__(
        self, name: str, mode: Mode, program: BpfObject, detach: Callable[[], None]
    ) -> None:
        self.name, self.mode = name, mode
        self._program, self._detach = program, detach
        self._live = program.mapped("live", LIVE, MOST_JOBS)
        self._lock = threading.Lock()  # of what follows
        self._free = set(range(MOST_JOBS))  # places in `_live` that no job has
        self._ports: set[int] = set()  # of the jobs

    @classmethod
    def opened(cls, name: str, mode: Mode = "auto") -> XdpDevice | str:
        """The line says why not; nothing stays attached then."""
        program = None
        try:
            interface = socket.if_nametoindex(name)
            program = BpfObject(SOURCE)
            if why := failed_trial(program):
                raise BpfError(f"the self-test of the program fails: {why}")
            link, taken = _attached(program, name, interface, mode)
        except (OSError, BpfError) as error:
            if program:
                program.close()
            why = str(error) if isinstance(error, BpfError) else "there is no such device"
            return f"no sums in the kernel on {name}: {why}; user space sums"

        def detach() -> None:
            os.close(link)
            program.close()

        return cls(name, taken, program, detach)

    def table(self, hello: SwitchHello, port: int, key: PacketKey, parent: Address) -> XdpTable:
        """port: UDP, where the job's packets come; parent: where sums go. Raises ConfigError for a
        port that has a job, children that one word cannot name, a parent without an IPv4 address;
        BudgetError where the device has no place for one more job; BpfError where the kernel gives
        no memory."""
        with self._lock:
            if port in self._ports:
                raise ConfigError(f"device {self.name} has a job on port {port}")
            if not self._free:
                raise BudgetError(f"device {self.name} has {MOST_JOBS} jobs, at most {MOST_JOBS}")
            place = self._free.pop()
            self._ports.add(port)
        closed = partial(self._forget, place, port)
        try:
            told = XdpJob(
                hello.job,
                port,
                hello.children,
                hello.child,
                hello.slots,
                key,
                parent,
                place,
                hello.first,
            )
            row = self._live[place : place + 1]
            return XdpTable(self._program, self.name, told, row, closed)
        except BaseException:
            closed()
            raise

    def _forget(self, place: int, port: int) -> None:
        with self._lock:
            self._free.add(place)
            self._ports.remove(port)

    def close(self) -> None:
        """Once, after its tables. Packets go to user space from now on."""
        self._detach()


def _attached(program: BpfObject, name: str, interface: int, mode: Mode) -> tuple[int, Mode]:
    """The link's descriptor and the mode. Native where that is to be had."""
    attach = partial(program.attach, program.program("take_packet"), interface)
    if mode != "generic":
        try:
            link = attach(NATIVE)
        except BpfError:
            if mode == "native":
                raise
        else:
            if mode == "native" or _sends(program, name, interface):
                return link, "native"
            os.close(link)
    return attach(GENERIC), "generic"


def _sends(program: BpfObject, name: str, interface: int) -> bool:
    """Whether packets that the program sends leave the device. See note "Modes"."""
    if is_hardware(name):  # whose driver refuses a program where it cannot send
        return True
    own = hardware_address(name)
    frame = np.zeros(TRIAL_NBYTES, np.uint8)
    head = own + own + EXPERIMENT  # to ourselves: who gets it has nobody to pass it to
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    before = _sent(name)
    try:
        program.run_live(program.program("echo_packet"), frame, interface, TRIALS)
    except BpfError:
        return False
    until = time.monotonic() + TRIAL_S
    while _sent(name) < before + TRIALS:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _sent(name: str) -> int:
    """Packets that left the device."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == name:
            return int(numbers.split()[SENT_COLUMN])
    return 0
