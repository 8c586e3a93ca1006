"""Plan training on a cluster: search for the best plan, measure the figures it depends on (probe,
calibrate), report it, and derive the machines and job keys with which `roadtrain launch` runs it.

The pick is the candidate with the best simulated score; every refused candidate has a reason. Read
`plan.py` first, then `search.py` and `candidates.py`; `machines_of.py` and `job_keys.py` define how
a plan is run.
"""
