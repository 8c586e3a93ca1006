"""The lab: a cluster emulated on one machine, whose storage and network have set rates.

Every part of a lab is removed when the context of the part ends, also after an error. `sweep()`
removes the parts that a SIGKILL has left. Read `network.py` first (hosts, NICs, links), then
`storage.py` (SSDs). `lab_command.py` runs a lab that a file describes. `bad_link.py` has links with
deliberate faults.
"""

from roadtrain.lab.cpus import CpuLimit, cpus_available
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
