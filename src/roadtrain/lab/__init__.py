"""The lab: a cluster emulated on one machine; storage, network and relays, all with set rates. Everything made is
undone when its context ends; what a SIGKILL left, `sweep()` removes."""

from roadtrain.lab.leftovers import sweep
from roadtrain.lab.made import PREFIX
from roadtrain.lab.network import Host, Link, Network, Nic, network_available
from roadtrain.lab.relay import Relay
from roadtrain.lab.storage import LoopDevice, Throttle, TokenLink, lab_available

__all__ = ["PREFIX", "Host", "Link", "LoopDevice", "Network", "Nic", "Relay", "Throttle", "TokenLink", "lab_available",
           "network_available", "sweep"]
