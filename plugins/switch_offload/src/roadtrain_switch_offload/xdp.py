"""The table of a switch in the kernel: the program xdp_switch.bpf.c on a network device, and the
tables of its jobs.

    XdpDevice.opened("eth0")    tests the program (xdp_trial.py) and attaches it to the device, or
                                returns the reason why this fails
      .table(...) -> XdpTable   a job's table, which replaces SwitchTable of switch/switch_table.py

The kernel handles the packets listed at the head of the C file. It also sends the sums, once this
host has resolved the parent's hardware address. If one of these packets reaches user space
nevertheless, `XdpTable.add` passes the packet to the program, so all packets of a job are added in
one table. User space handles heartbeats and parameters.

Note "modes". In native mode, the program runs in the device's driver, before the kernel makes a
buffer for the packet. In generic mode, which every device supports, the program runs afterwards. If
segmentation offload has joined several packets, the program then sees one large packet, and user
space splits it. In native mode, the driver of a veth pair silently drops packets that a program
sends, if the other end of the pair does not run NAPI. (NAPI runs if the other end has a program of
its own, or if GRO is on.) So on a device without hardware, a few frames are sent as a trial. If
they do not leave the device, generic mode is used.
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
OBJECT = Path(__file__).with_name("xdp_switch.bpf.o")
TRIALS, TRIAL_NBYTES, TRIAL_S = 64, 60, 0.3  # trial frames: number, size, time limit
EXPERIMENT = bytes.fromhex("88b5")  # EtherType for local experiments (IEEE 802)
SENT_COLUMN = 9  # column of /proc/net/dev with the number of sent packets


class XdpDevice:
    """The program xdp_switch.bpf.c, attached to one device. The program serves all jobs of this
    process."""

    def __init__(
        self, name: str, mode: Mode, program: BpfObject, detach: Callable[[], None]
    ) -> None:
        self.name, self.mode = name, mode
        self._program, self._detach = program, detach
        self._live = program.mapped("live", LIVE, MOST_JOBS)
        self._lock = threading.Lock()  # guards `_free` and `_ports`
        self._free = set(range(MOST_JOBS))  # free indices of `_live`
        self._ports: set[int] = set()  # UDP ports of the jobs

    @classmethod
    def opened(cls, name: str, mode: Mode = "auto") -> XdpDevice | str:
        """Attach the program to the device `name`. If this fails, returns the reason as a string,
        and nothing stays attached."""
        program = None
        try:
            interface = socket.if_nametoindex(name)
            program = BpfObject(OBJECT)
            if why := failed_trial(program):
                raise BpfError(f"the self-test of the program failed: {why}")
            link, actual = _attached(program, name, interface, mode)
        except (OSError, BpfError) as error:
            if program:
                program.close()
            why = str(error) if isinstance(error, BpfError) else "there is no such device"
            return f"no sums in the kernel on {name}: {why}; summing in user space"

        def detach() -> None:
            os.close(link)
            program.close()

        return cls(name, actual, program, detach)

    def table(self, hello: SwitchHello, port: int, key: PacketKey, parent: Address) -> XdpTable:
        """Make the table of a job. The job's packets arrive at the UDP port `port`, and its sums go
        to `parent`.

        Raises:
            ConfigError: Another job uses the port, there are too many children, or the parent has
                no IPv4 address.
            BudgetError: The device already has the maximum number of jobs.
            BpfError: The kernel does not have enough memory.
        """
        with self._lock:
            if port in self._ports:
                raise ConfigError(f"device {self.name} already has a job on port {port}")
            if not self._free:
                raise BudgetError(f"device {self.name} has {MOST_JOBS} jobs already, the maximum")
            place = self._free.pop()
            self._ports.add(port)
        closed = partial(self._forget, place, port)
        try:
            record = XdpJob(
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
            return XdpTable(self._program, self.name, record, row, closed)
        except BaseException:
            closed()
            raise

    def _forget(self, place: int, port: int) -> None:
        with self._lock:
            self._free.add(place)
            self._ports.remove(port)

    def close(self) -> None:
        """Detach the program, so that all packets go to user space. Call this method once, after
        all tables were closed."""
        self._detach()


def _attached(program: BpfObject, name: str, interface: int, mode: Mode) -> tuple[int, Mode]:
    """Attach the program in `mode`; "auto" is native mode if packets can be sent in it, otherwise
    generic mode. Returns the descriptor that keeps the program attached, and the mode that was
    used."""
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
    """Return True if packets that the program sends in native mode really leave the device."""
    if is_hardware(name):  # a driver of hardware refuses the program if it cannot send its packets
        return True
    own = hardware_address(name)
    frame = np.zeros(TRIAL_NBYTES, np.uint8)
    head = own + own + EXPERIMENT  # from and to this device, so that no receiver forwards the frame
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
    """Return the number of packets that have left the device."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == name:
            return int(numbers.split()[SENT_COLUMN])
    return 0
