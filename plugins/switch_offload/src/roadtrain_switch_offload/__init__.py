"""Tables of a switch (roadtrain/switch/switch_table.py) outside the switch's process.

    roadtrain serve HOST:PORT --switch --xdp eth0     sums in the Linux kernel, where packets arrive

`xdp.py` attaches the program xdp_switch.bpf.c to a network device. The option `--xdp` finds it by
the entry point `xdp` of the group roadtrain.switch_tables. switch.p4 is the same table for a
programmable switch, and `p4_entries.py` makes the entries that the switch's control plane needs.
Read xdp.py first.
"""
