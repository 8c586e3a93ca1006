"""Plan training on a cluster: search for the best plan, report the plan, and derive the machines
and job keys with which `roadtrain launch` runs the plan. `probe.py` and `calibrate.py` measure the
figures on which a plan depends.

The pick is the candidate with the best simulated score. Every refused candidate has a reason. Read
`plan.py` first, then `search.py` and `candidates.py`. `machines_of.py` and `job_keys.py` define how
a plan is run.
"""
