"""Plan training on a cluster: search for the best plan, report the plan, and derive from the plan
the machines and job keys that `roadtrain launch` uses to run the plan. `probe.py` and
`calibrate.py` measure the figures on which a plan depends.

The plan that is picked is the candidate with the best simulated score. For each refused candidate,
the planner states the reason. Read `plan.py` first, then `search.py` and `candidates.py`.
`machines_of.py` and `job_keys.py` define how a plan is run.
"""
