"""SlotQuota: the memory of a switch, given to jobs as slots of their tables.

A job costs its table, what the kernel may hold of its datagrams in both directions, and what waits
to be sent. All of it is counted before a job is let in, so a switch never holds more than its
budget, whatever comes (Rule 4). Called from any thread.
"""

from __future__ import annotations

import threading

from roadtrain.errors import BudgetError, BusyError, ConfigError
from roadtrain.switch.datagrams import RECEIVE_NBYTES
from roadtrain.switch.options import WINDOWS
from roadtrain.switch.packets import PACKET_NBYTES, PAYLOAD_NBYTES
from roadtrain.switch.switch_job import READ_NBYTES
from roadtrain.switch.switch_table import SLOT
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


class SlotQuota:
    """Invariant, under `_lock`: 0 <= `_used` <= `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError where not even one small job fits."""
        self.nbytes = nbytes
        self._most_receive = max(nbytes // RECEIVE_SHARE, LEAST_RECEIVE)
        self.send_nbytes = min(max(nbytes // SEND_SHARE, LEAST_SEND), MOST_SEND)
        self._slots = 0  # that jobs have
        self._used = SHARED_NBYTES
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
    def used_slots(self) -> int:
        return self._slots

    @property
    def used_nbytes(self) -> int:
        return self._used

    @property
    def free_slots(self) -> int:
        """That the next job can have for sure, however many children it has."""
        left = (self.nbytes - self._used - self._cost(0, self._most_receive)) // SLOT_NBYTES
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
                    f" {self._slots} are in use",
                    hint="a smaller window in the job's fan_in, more --memory at the switch, or a"
                    " job less",
                )
            self._slots += slots
            self._used += cost

    def give_back(self, slots: int, children: int) -> None:
        with self._lock:
            self._slots -= slots
            self._used -= self._cost(slots, self.receive_nbytes(slots, children))
