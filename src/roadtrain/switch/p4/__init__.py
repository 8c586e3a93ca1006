"""The table of a switch as a P4-16 program (switch.p4), and the entries that its control plane
sets (entries.py)."""
