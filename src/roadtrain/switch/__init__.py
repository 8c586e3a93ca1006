"""Sums inside the network: switches add up the gradients of a job's workers and copy parameters to
all workers (LuWu's switch).

    workers --UDP--> switches --UDP--> the server's fan-in end   fan_in_link.py, switch.py, end.py
    workers <--UDP-- switches <--UDP-- the server's fan-in end

Gradients are summed as integers, so the sum does not depend on the order of packets, resends or
restarts. docs/rooms/switch.md follows the data.
"""
