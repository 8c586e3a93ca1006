"""Sums inside the network (LuWu's switch): switches add up the gradients of a job's workers and
copy parameters to all workers, so every link carries each parameter once each way.

    workers --UDP--> switches --UDP--> the server's fan-in end   fan_in_link.py, switch.py, end.py
    workers <--UDP-- switches <--UDP-- the server's fan-in end

Gradients are summed as integers with a scale per block, so the sum does not depend on the order of
packets, on retransmissions or on restarts of switches. The memory of a switch is bounded. A switch
keeps no state that must survive a restart, and drops packets without the job's tag.

Start reading at switch.py. `options.py` describes the tree of switches, `protocol/` has the state
machines, and the other files do the I/O. docs/rooms/switch.md follows the data.
"""
