"""What the control plane of a switch that runs switch.p4 sets for its jobs, as JSON.

The form is that of the P4 tutorials' controllers: `table_entries` (table, match, action_name,
action_params), `multicast_group_entries` (replicas with a port and an instance). `register_resets`
is ours: cells to be set to 0 before a job begins, since a former job's numbers mean nothing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roadtrain.errors import BudgetError, ConfigError
from roadtrain.switch.options import MOST_CHILDREN

SLOTS, JOBS = 4096, 64  # of switch.p4, unless it is compiled with others
CHILDREN_EACH = 64  # instances of copies that a job has

Entry = dict[str, Any]


@dataclass(frozen=True)
class P4Neighbour:
    """Who is at a port of the switch: the job's parent or a child."""

    port: int  # of the switch
    mac: str  # aa:bb:cc:dd:ee:ff
    host: str  # IPv4
    udp: int


@dataclass(frozen=True)
class P4Job:
    """Raises ConfigError for slots that are no power of two, and children that one word cannot
    name."""

    job: int  # of the packets
    host: str  # IPv4, of the switch
    udp: int  # where the job's packets come
    mac: str  # of the switch
    child: int  # what the switch calls itself to its parent; the root: packets.ROOT
    slots: int
    parent: P4Neighbour
    children: tuple[P4Neighbour, ...]  # in the order of their child numbers
    first: int = 0  # what child 0 calls itself in packets

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slots & (self.slots - 1):
            raise ConfigError(f"{self.slots} slots of a programmable switch", hint="a power of two")
        if not 1 <= len(self.children) <= MOST_CHILDREN:
            raise ConfigError(f"{len(self.children)} children, 1 to {MOST_CHILDREN} are possible")


def entries(jobs: Sequence[P4Job], slots: int = SLOTS) -> Entry:
    """Each job gets a run of slots and a multicast group of its own. Raises BudgetError where the
    slots or the places for jobs do not suffice (Rule 4), ConfigError for two jobs whose packets
    could not be told apart."""
    wanted = sum(one.slots for one in jobs)
    if wanted > slots or len(jobs) > JOBS:
        raise BudgetError(
            f"{len(jobs)} jobs with {wanted} slots, the switch has {JOBS} places and {slots} slots",
            hint="a smaller window",
        )
    if len({(one.host, one.udp, one.job) for one in jobs}) < len(jobs):
        raise ConfigError("two jobs of one number at one UDP port")
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
    """Of a copy; 0 is what is no copy."""
    return place * CHILDREN_EACH + child + 1


def _turned(number: int, nbytes: int) -> int:
    """As a switch, which reads big endian, sees a little-endian field."""
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
    made = []
    for number, child in enumerate(job.children):
        made.append(
            {
                "table": "Ingress.children",
                "match": {
                    "meta.job.place": place,
                    "hdr.head.sender": _turned(job.first + number, 2),
                    "standard.ingress_port": child.port,
                },
                "action_name": "Ingress.this_child",
                "action_params": {"who": 1 << number},
            }
        )
        made.append(
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
            }
        )
    return made
