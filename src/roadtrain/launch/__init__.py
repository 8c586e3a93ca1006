"""Launch a plan and a job as running processes, and control the run by its name.

Guarantees: No process starts if the checks before the start find problems. A process that ends
early is restarted from the committed step. No process outlives its run. Every wait has a deadline.

Read `launch.py` first. `protocol/` decides about restarts. `here.py` starts processes on this host,
`lab_engine.py` in a lab, and `ray/` on a Ray cluster. `write_slurm.py` and `write_kubernetes.py`
write files from which Slurm and Kubernetes start the same processes.
"""
