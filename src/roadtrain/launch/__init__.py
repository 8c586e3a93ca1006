"""Launch a plan and a job as running processes, and control the run by its name.

Guarantees: No process starts before all problems are reported. A process that ends early is
restarted from the committed step, and the log announces the restart. No process outlives its run.
Every wait has a deadline.

Read `launch.py` first: it lists the files in the order in which a launch uses them. `protocol/`
decides about restarts. `here.py`, `lab_engine.py` and `ray/` start processes on this host, in a
lab and on a Ray cluster. `write_slurm.py` and `write_kubernetes.py` write files from which Slurm
and Kubernetes start the same processes.
"""
