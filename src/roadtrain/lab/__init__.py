"""The lab: a cluster emulated on one machine; storage and network with set rates.

Promises: everything that was made is undone when its context ends, also by an error; what a SIGKILL
left, `sweep()` removes. Read `network.py` first (hosts, cards, links), then `storage.py` (SSDs).
`lab_command.py` holds a lab of a file that is up; links that are bad on purpose are in
`roadtrain.lab.bad_link`.
"""

from roadtrain.lab.cpus import CpuLimit, cpus_available
from roadtrain.lab.hosts import LabHost
from roadtrain.lab.leftovers import sweep
from roadtrain.lab.made import PREFIX
from roadtrain.lab.network import CARRIED, Network, loss_available, network_available
from roadtrain.lab.nics import CARD_MOST, LabLink, LabNic, Traffic
from roadtrain.lab.storage import LoopDevice, Throttle, lab_available

__all__ = [
    "CARD_MOST",
    "CARRIED",
    "PREFIX",
    "CpuLimit",
    "LabHost",
    "LabLink",
    "LabNic",
    "LoopDevice",
    "Network",
    "Throttle",
    "Traffic",
    "cpus_available",
    "lab_available",
    "loss_available",
    "network_available",
    "sweep",
]
