"""Admission: what a switch checks and gives away before it lets a job in.

    checked      the job's greeting can be
    SlotQuota    memory, as slots of the job's table
    job_socket   a UDP port of the job's own
    job_table    the table of its sums: the device's, or one of this process

A job costs its table, what the kernel may hold of its datagrams in both directions, and what waits
to be sent. All of it is counted before a job is let in, so a switch never holds more than its
budget, whatever comes (Rule 4).
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
# What waits to be sent when the kernel takes no more: a run that is copied down, one that goes up
WAITING_NBYTES = 2 * READ_NBYTES
COUNTERS_NBYTES = 16 * KIB  # of a table and its job, generously
# Of the budget, that the kernel holds of one job's datagrams at most; it takes twice what is asked
# for. Of what comes, no job needs more than all its children may have under way.
RECEIVE_SHARE, SEND_SHARE = 16, 64
LEAST_RECEIVE, LEAST_SEND = 2 * RECEIVE_NBYTES, 2 * RECEIVE_NBYTES
MOST_SEND = 2 * MIB  # so that more memory holds more jobs
MOST_SLOTS = WINDOWS[-1]  # of one job
MOST_NAME = 200  # characters of a session's name that are shown


def checked(said: switch_frames.SwitchHello) -> switch_frames.SwitchHello:
    """Raises WireError for what no job asks for."""
    if said.first > ROOT - said.children:
        raise WireError(f"a first child that calls itself {said.first}")
    shown = "".join(c for c in said.session if c.isprintable())[:MOST_NAME]
    return said._replace(session=shown)


class SlotQuota:
    """The memory of a switch. Called from any thread. Invariant, under `_lock`: 0 <=
    `used_nbytes` <= `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError where not even one small job fits."""
        self.nbytes = nbytes
        self._most_receive = max(nbytes // RECEIVE_SHARE, LEAST_RECEIVE)
        self.send_nbytes = min(max(nbytes // SEND_SHARE, LEAST_SEND), MOST_SEND)
        self.used_slots = 0  # that jobs have
        self.used_nbytes = SHARED_NBYTES
        self._lock = threading.Lock()
        least = SHARED_NBYTES + self._cost(WINDOWS[0], LEAST_RECEIVE)
        if nbytes < least:
            raise ConfigError(
                f"a switch with {show_bytes(nbytes)} of memory, {show_bytes(least)} hold one job"
                f" with {WINDOWS[0]} slots",
                hint=f"--memory {least // KIB + 1}KiB or more",
            )

    def receive_nbytes(self, slots: int, children: int) -> int:
        """What a job's socket is to hold of what has come."""
        return min(max(children * slots * PACKET_NBYTES, LEAST_RECEIVE), self._most_receive)

    def _cost(self, slots: int, receive_nbytes: int) -> int:
        """Bytes of a job."""
        of_sockets = 2 * (receive_nbytes + self.send_nbytes)
        return slots * SLOT_NBYTES + of_sockets + WAITING_NBYTES + COUNTERS_NBYTES

    @property
    def free_slots(self) -> int:
        """That the next job can have for sure, however many children it has."""
        left = (self.nbytes - self.used_nbytes - self._cost(0, self._most_receive)) // SLOT_NBYTES
        return min(max(left, 0), MOST_SLOTS)

    def take(self, slots: int, children: int, job: str) -> None:
        """Raises with both numbers where so many are not free: BusyError where other jobs have
        them, who may be leaving, BudgetError where this switch never has so many."""
        cost = self._cost(slots, self.receive_nbytes(slots, children))
        with self._lock:
            if slots > self.free_slots:
                ever = SHARED_NBYTES + self._cost(slots, self._most_receive) <= self.nbytes
                raise (BusyError if ever else BudgetError)(
                    f"job {job} asks this switch for {slots} slots, {self.free_slots} are free,"
                    f" {self.used_slots} are in use",
                    hint="a smaller window in the job's fan_in, more --memory at the switch, or a"
                    " job less",
                )
            self.used_slots += slots
            self.used_nbytes += cost

    def give_back(self, slots: int, children: int) -> None:
        with self._lock:
            self.used_slots -= slots
            self.used_nbytes -= self._cost(slots, self.receive_nbytes(slots, children))


def job_socket(
    switch: Address,
    said: switch_frames.SwitchHello,
    taken: Mapping[int, str],
    quota: SlotQuota,
    report: Report,
) -> DatagramSocket:
    """A socket at the port that the job had before, or at one that is free. Raises BusyError.

    Args:
        switch: host and TCP port of this switch
        taken: ports of jobs, each with the job's name
    """

    def socket_at(port: int) -> DatagramSocket:
        return DatagramSocket(
            (switch[0], port),
            receive_nbytes=quota.receive_nbytes(said.slots, said.children),
            send_nbytes=quota.send_nbytes,
            report=report,
        )

    if said.port in taken:
        raise BusyError(f"port {said.port} of this switch is that of job {taken[said.port]} now")
    # Jobs begin to look at different ports: after a restart each finds its own one free.
    ports = [switch[1] + 1 + (said.job + i) % MOST_JOBS for i in range(MOST_JOBS)]
    if said.port:
        if said.port not in ports:
            raise WireError(
                f"job {said.session} asks for port {said.port}, this switch has {min(ports)} to"
                f" {max(ports)}"
            )
        try:
            return socket_at(said.port)
        except ConfigError as error:  # the job's own, of a link that has just ended, perhaps
            raise BusyError(str(error)) from None
    for port in ports:
        if port not in taken and port < 1 << 16:
            with suppress(ConfigError):  # another process has it
                return socket_at(port)
    raise BusyError(
        f"no port for datagrams is free from {min(ports)} to {max(ports)}, {len(taken)} jobs"
        " have one",
        hint="another switch, or a port with free ones above it",
    )


def job_table(
    device: TableDevice | None,
    said: switch_frames.SwitchHello,
    key: PacketKey,
    port: int,
    parent: Address,
    report: Report,
) -> Table:
    """A table of the device; one of this process where there is none, or it says why not."""
    if device is not None:
        try:
            return device.table(said, port, key, parent)
        except (RoadtrainError, OSError) as error:  # as of a device that is gone
            why = str(error).partition("\n")[0]
            report(f"job {said.session}: no sums in the kernel: {why}; user space sums")
    return SwitchTable(said.slots, said.children, said.first)
