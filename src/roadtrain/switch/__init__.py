"""Sums inside the network (LuWu's switch): switches add up the gradients of a job's workers and
copy parameters to all of them, so every link carries each parameter once each way.

    workers --UDP--> switches --UDP--> the server's fan-in end   fan_in_link.py, switch.py, end.py
    workers <--UDP-- switches <--UDP-- the server's fan-in end

Sums are those of integers with a scale per block: the same in whatever order packets arrive,
however often they are lost and sent again, and whichever switch restarts. A switch is bounded by
its memory, holds nothing that a restart needs, and takes no packet without the job's tag.

Read switch.py first. `options.py` is the tree that a job describes, `protocol/` decides, all else
carries out; docs/concepts/fan-in.md follows the data.
"""
