"""Implementations of a switch's table (roadtrain/switch/switch_table.py) outside the switch's
process.

    roadtrain serve HOST:PORT --switch --xdp eth0     sums in the Linux kernel, where packets arrive

`xdp.py` attaches the program xdp_switch.bpf.c to a network device. switch.p4 is the same table for
a programmable network switch, and `p4_entries.py` makes the entries that the control plane of this
switch needs. Read xdp.py first.
"""
