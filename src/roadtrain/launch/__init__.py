"""From a plan and a job to running processes, and what is asked of such a run by its name.

Promises: nothing starts before everything that is wrong was said; what ends is started again at the
committed step, and announced first; what a run has started ends with it; no wait is without a
deadline. Read `launch.py` first: it names the files in the order in which they act. `protocol/`
decides what keeps a run going; `here.py`, `lab_engine.py` and `ray/` start processes on this host,
in a lab and on a Ray cluster; `write_slurm.py` and `write_kubernetes.py` write files that start
the same processes there.
"""
