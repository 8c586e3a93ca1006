"""Plans for a cluster: the search for the best one, the figures it rests on (probe, calibrate), the
reports, and the machines and job keys by which `roadtrain launch` runs a plan.

The pick is the best of all candidates by the simulator, and each candidate that is refused has a
reason. Read `plan.py` first, then `search.py` and `candidates.py`; `machines_of.py` and
`job_keys.py` say how a plan is run.
"""
