"""The lab: a cluster emulated on one machine; storage and network with set rates. Everything made
is undone when its context ends; what a SIGKILL left, `sweep()` removes. `roadtrain.lab.relay` has
links that are bad on purpose.
"""

from roadtrain.lab.leftovers import sweep
from roadtrain.lab.made import PREFIX
from roadtrain.lab.network import CARRIED, LabHost, LabLink, LabNic, Network, network_available
from roadtrain.lab.storage import LoopDevice, Throttle, lab_available

__all__ = [
    "CARRIED",
    "PREFIX",
    "LabHost",
    "LabLink",
    "LabNic",
    "LoopDevice",
    "Network",
    "Throttle",
    "lab_available",
    "network_available",
    "sweep",
]
