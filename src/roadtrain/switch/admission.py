"""Admission of jobs to a switch: the checks and the resources of a new job.

    checked      validates the job's greeting
    SlotQuota    reserves memory, counted in slots of the job's table
    job_socket   opens a UDP port for the job
    job_table    makes the table of the job's sums, in the network device or in this process

All memory of a job is counted before the job is admitted (Rule 4), also the kernel's buffers of its
socket.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress

from roadtrain.errors import BudgetError, BusyError, ConfigError, RoadtrainError, WireError
from roadtrain.switch import switch_frames
from roadtrain.switch.datagrams import RECEIVE_NBYTES, DatagramSocket
from roadtrain.switch.options import MOST_JOBS, WINDOWS
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES, ROOT, PacketKey
from roadtrain.switch.switch_job import READ_NBYTES
from roadtrain.switch.switch_table import SLOT, SwitchTable, Table, TableDevice
from roadtrain.transport.listener import Report
from roadtrain.transport.tcp import Address
from roadtrain.units import KIB, MIB, show_bytes

SLOT_NBYTES = SLOT.itemsize + PAYLOAD_NBYTES
SHARED_NBYTES = 4 * READ_NBYTES  # buffers of the packet loop, one set for all jobs
# Unsent packets while the send buffer is full: one run going down and one going up
WAITING_NBYTES = 2 * READ_NBYTES
COUNTERS_NBYTES = 16 * KIB  # counters of a table and its job, estimated generously
# A job's receive buffer is at most 1/16 of the budget, and its send buffer 1/64. The kernel
# allocates twice as much. A receive buffer need not hold more packets than all children together
# may have in flight.
RECEIVE_SHARE, SEND_SHARE = 16, 64
LEAST_RECEIVE, LEAST_SEND = 2 * RECEIVE_NBYTES, 2 * RECEIVE_NBYTES
MOST_SEND = 2 * MIB  # so that more memory holds more jobs
MOST_SLOTS = WINDOWS[-1]  # of one job
MOST_NAME = 200  # characters of a session's name that are shown


def checked(hello: switch_frames.SwitchHello) -> switch_frames.SwitchHello:
    """Return a greeting with a printable session name. Raises WireError if the greeting is
    invalid.
    """
    if hello.first > ROOT - hello.children:
        raise WireError(f"the first child's number {hello.first} exceeds {ROOT - hello.children}")
    shown = "".join(c for c in hello.session if c.isprintable())[:MOST_NAME]
    return hello._replace(session=shown)


class SlotQuota:
    """The memory budget of a switch. Each job reserves the memory for the slots of the job's table.
    Thread-safe.
    """

    def __init__(self, nbytes: int) -> None:
        """Create a budget for all jobs. Raises ConfigError if `nbytes` is too small for the
        smallest job.
        """
        self.nbytes = nbytes
        self._most_receive = max(nbytes // RECEIVE_SHARE, LEAST_RECEIVE)
        self.send_nbytes = min(max(nbytes // SEND_SHARE, LEAST_SEND), MOST_SEND)
        self.used_slots = 0  # slots of all admitted jobs
        self.used_nbytes = SHARED_NBYTES
        self._lock = threading.Lock()
        least = SHARED_NBYTES + self._cost(WINDOWS[0], LEAST_RECEIVE)
        if nbytes < least:
            raise ConfigError(
                f"a switch with {show_bytes(nbytes)} of memory is too small: one job with"
                f" {WINDOWS[0]} slots needs {show_bytes(least)}",
                hint=f"use --memory {least // KIB + 1}KiB or more",
            )

    def receive_nbytes(self, slots: int, children: int) -> int:
        """Return the size in bytes of a socket's receive buffer, for a job with `slots` slots and
        `children` senders.
        """
        return min(max(children * slots * PACKET_NBYTES, LEAST_RECEIVE), self._most_receive)

    def _cost(self, slots: int, receive_nbytes: int) -> int:
        """Return the memory in bytes of a job with `slots` slots and this receive buffer."""
        of_sockets = 2 * (receive_nbytes + self.send_nbytes)
        return slots * SLOT_NBYTES + of_sockets + WAITING_NBYTES + COUNTERS_NBYTES

    @property
    def free_slots(self) -> int:
        """The number of slots that the next job can have, whatever its number of children."""
        left = (self.nbytes - self.used_nbytes - self._cost(0, self._most_receive)) // SLOT_NBYTES
        return min(max(left, 0), MOST_SLOTS)

    def take(self, slots: int, children: int, job: str) -> None:
        """Reserve slots for a job.

        Raises:
            BusyError: Other jobs use the slots, which may become free later.
            BudgetError: The switch is too small for so many slots.
        """
        cost = self._cost(slots, self.receive_nbytes(slots, children))
        with self._lock:
            if slots > self.free_slots:
                ever = SHARED_NBYTES + self._cost(slots, self._most_receive) <= self.nbytes
                raise (BusyError if ever else BudgetError)(
                    f"job {job} asks this switch for {slots} slots, but only {self.free_slots} are"
                    f" free ({self.used_slots} are in use)",
                    hint="reduce the window in the job's fan_in, give the switch more --memory, or"
                    " stop another job",
                )
            self.used_slots += slots
            self.used_nbytes += cost

    def give_back(self, slots: int, children: int) -> None:
        with self._lock:
            self.used_slots -= slots
            self.used_nbytes -= self._cost(slots, self.receive_nbytes(slots, children))


def job_socket(
    switch: Address,
    hello: switch_frames.SwitchHello,
    used: Mapping[int, str],
    quota: SlotQuota,
    report: Report,
) -> DatagramSocket:
    """Open the UDP socket of a job, at the port that the job asks for, or at any free port.

    Args:
        switch: Host and TCP port of this switch.
        used: Maps each port in use to the name of the job that uses it.

    Raises:
        BusyError: The job's port is in use, or no port is free.
        WireError: The job asks for a port that this switch does not have.
    """

    def socket_at(port: int) -> DatagramSocket:
        return DatagramSocket(
            (switch[0], port),
            receive_nbytes=quota.receive_nbytes(hello.slots, hello.children),
            send_nbytes=quota.send_nbytes,
            report=report,
        )

    if hello.port in used:
        raise BusyError(f"port {hello.port} of this switch is in use by job {used[hello.port]}")
    # Jobs search from different ports on, so that a job's old port is likely free after a restart.
    ports = [switch[1] + 1 + (hello.job + i) % MOST_JOBS for i in range(MOST_JOBS)]
    if hello.port:
        if hello.port not in ports:
            raise WireError(
                f"job {hello.session} asks for port {hello.port}, but this switch has ports"
                f" {min(ports)} to {max(ports)}"
            )
        try:
            return socket_at(hello.port)
        except ConfigError as error:  # perhaps still open for this job's previous link
            raise BusyError(str(error)) from None
    for port in ports:
        if port not in used and port < 1 << 16:
            with suppress(ConfigError):  # another process uses this port
                return socket_at(port)
    raise BusyError(
        f"no UDP port from {min(ports)} to {max(ports)} is free, {len(used)} are in use by jobs",
        hint="use another switch, or run this switch at a TCP port with free ports above it",
    )


def job_table(
    device: TableDevice | None,
    hello: switch_frames.SwitchHello,
    key: PacketKey,
    port: int,
    parent: Address,
    report: Report,
) -> Table:
    """Make the table of the job's sums in the network device, or in this process if that is
    impossible.
    """
    if device is not None:
        try:
            return device.table(hello, port, key, parent)
        except (RoadtrainError, OSError) as error:  # for example a device that was removed
            why = str(error).partition("\n")[0]
            report(f"job {hello.session}: no sums in the kernel: {why}; user space sums instead")
    return SwitchTable(hello.slots, hello.children, hello.first)
