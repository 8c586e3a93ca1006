"""Device memory: page-aligned buffers, pinned host memory, copies between host and device.

On the CPU the same code runs without copies. Read `buffers.py` first, then `copies.py`.
"""
