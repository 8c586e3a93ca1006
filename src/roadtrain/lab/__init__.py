"""The lab: a cluster emulated on one machine, whose storage and network have set rates.

Everything in a lab is removed when its context ends, also after an error; `sweep()` removes what a
SIGKILL has left. Read `network.py` first (hosts, NICs, links), then `storage.py` (SSDs).
"""

from roadtrain.lab.cpus import cpus_available
from roadtrain.lab.hosts import LabHost
from roadtrain.lab.leftovers import sweep
from roadtrain.lab.network import CARRIED, Network, loss_available, network_available
from roadtrain.lab.nics import CARD_MOST, LabLink, LabNic, Traffic
from roadtrain.lab.resource import PREFIX
from roadtrain.lab.storage import LoopDevice, Throttle, lab_available

__all__ = [
    "CARD_MOST",
    "CARRIED",
    "PREFIX",
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
