"""Sums inside the network (LuWu's switch): switches add up the gradients of a job's workers and
copy parameters to all workers. So each link carries the gradient of a parameter once, and the new
value of the parameter once.

    workers --UDP--> switches --UDP--> the server's fan-in end   fan_in_link.py, switch.py, end.py
    workers <--UDP-- switches <--UDP-- the server's fan-in end

Gradients are summed as integers with one scale for each block of elements. So the sum does not
depend on the order of packets, on retransmissions or on restarts of switches. The memory of a
switch is bounded. A switch has no state that must survive a restart. A switch drops packets without
the job's authentication tag.

Start reading at switch.py. `options.py` describes the tree of switches, `protocol/` has the state
machines, and the other files do the I/O. docs/rooms/switch.md follows the data.
"""
