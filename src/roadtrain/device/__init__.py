"""What an accelerator does: memory under a budget, copies, pinned host memory.

On a CPU the same lines run without copies. Read `buffers.py` first, then `copies.py`.
"""
