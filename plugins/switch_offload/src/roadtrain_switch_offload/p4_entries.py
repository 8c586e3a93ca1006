"""The table entries for the jobs of a network switch that runs switch.p4, as JSON. The control
plane of the switch sets these entries.

The JSON has the format that the controllers of the P4 tutorials read: `table_entries` (table,
match, action_name, action_params) and `multicast_group_entries` (replicas with a port and an
instance). In addition, `register_resets` lists the cells of registers that must be set to 0 before
a job begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roadtrain.errors import BudgetError, ConfigError
from roadtrain.switch.options import MOST_CHILDREN

SLOTS, JOBS = 4096, 64  # default numbers of slots and jobs in switch.p4
CHILDREN_EACH = 64  # multicast instances per job

Entry = dict[str, Any]


@dataclass(frozen=True)
class P4Neighbour:
    """A node at a port of the switch: the job's parent or a child."""

    port: int  # port of the switch
    mac: str  # MAC address of the node, as aa:bb:cc:dd:ee:ff
    host: str  # IPv4 address of the node
    udp: int  # UDP port of the node


@dataclass(frozen=True)
class P4Job:
    """A job of the switch. Raises ConfigError if the number of slots is not a power of two, or if
    there are no children or more than 64."""

    job: int  # job number in packets
    host: str  # IPv4 address of the switch
    udp: int  # UDP port of the job's packets
    mac: str  # MAC address of the switch
    child: int  # number of the switch at its parent; packets.ROOT for the root
    slots: int
    parent: P4Neighbour
    children: tuple[P4Neighbour, ...]  # ordered by child number
    first: int = 0  # number of child 0 in packets

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slots & (self.slots - 1):
            raise ConfigError(
                f"a job has {self.slots} slots, but the number of slots must be a power of two",
                hint="use 1024, for example",
            )
        if not 1 <= len(self.children) <= MOST_CHILDREN:
            raise ConfigError(
                f"a job has {len(self.children)} children, but must have 1 to {MOST_CHILDREN}"
            )


def entries(jobs: Sequence[P4Job], slots: int = SLOTS) -> Entry:
    """Assign a range of slots and a multicast group to each job, and return the table entries for
    all jobs. `slots` is the number of slots of the switch.

    Raises BudgetError if there are too few slots or too many jobs. Raises ConfigError if packets of
    two jobs have the same address, UDP port and job number.
    """
    needed = sum(job.slots for job in jobs)
    if needed > slots or len(jobs) > JOBS:
        raise BudgetError(
            f"{len(jobs)} jobs need {needed} slots, but the switch has {slots} slots, and room for"
            f" {JOBS} jobs",
            hint="use fewer slots for each job, or run fewer jobs",
        )
    if len({(job.host, job.udp, job.job) for job in jobs}) < len(jobs):
        raise ConfigError("two jobs have the same host, UDP port and job number")
    made: Entry = {"table_entries": [], "multicast_group_entries": [], "register_resets": []}
    base = 0
    for place, job in enumerate(jobs):
        made["table_entries"] += [_job_entry(job, place, base), *_children_entries(job, place)]
        made["multicast_group_entries"].append(
            {
                "multicast_group_id": place + 1,
                "replicas": [
                    {"egress_port": child.port, "instance": _instance(place, number)}
                    for number, child in enumerate(job.children)
                ],
            }
        )
        made["register_resets"] += [
            {"register": "Ingress.came", "first": base, "count": job.slots},
            {"register": "Ingress.acked", "first": place, "count": 1},
        ]
        base += job.slots
    return made


def _instance(place: int, child: int) -> int:
    """Return the multicast instance that marks the packet copies for a child. 0 marks a packet that
    is not a copy, so the number is never 0."""
    return place * CHILDREN_EACH + child + 1


def _turned(number: int, nbytes: int) -> int:
    """Swap the bytes of a little-endian field of `nbytes` bytes, because the P4 switch reads
    numbers as big endian."""
    return int.from_bytes(number.to_bytes(nbytes, "little"), "big")


def _job_entry(job: P4Job, place: int, base: int) -> Entry:
    return {
        "table": "Ingress.jobs",
        "match": {
            "hdr.ipv4.destination": job.host,
            "hdr.udp.destination": job.udp,
            "hdr.head.job": _turned(job.job, 4),
        },
        "action_name": "Ingress.this_job",
        "action_params": {
            "place": place,
            "base": base,
            "mask": job.slots - 1,
            "all_bits": (1 << len(job.children)) - 1,
            "child": job.child,
            "port": job.parent.port,
            "group": place + 1,
            "parent_mac": job.parent.mac,
            "own_mac": job.mac,
            "parent_host": job.parent.host,
            "parent_udp": job.parent.udp,
        },
    }


def _children_entries(job: P4Job, place: int) -> list[Entry]:
    made: list[Entry] = []
    for number, child in enumerate(job.children):
        made += [
            {
                "table": "Ingress.children",
                "match": {
                    "meta.job.place": place,
                    "hdr.head.sender": _turned(job.first + number, 2),
                    "standard.ingress_port": child.port,
                },
                "action_name": "Ingress.this_child",
                "action_params": {"who": 1 << number},
            },
            {
                "table": "Egress.copies",
                "match": {"standard.egress_rid": _instance(place, number)},
                "action_name": "Egress.to_child",
                "action_params": {
                    "own_mac": job.mac,
                    "mac": child.mac,
                    "host": child.host,
                    "udp": child.udp,
                },
            },
        ]
    return made
