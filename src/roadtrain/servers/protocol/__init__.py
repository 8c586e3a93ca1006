"""The state machines of servers and workers: events in, actions out. The simulator and real
processes run the same state machines (Rule 7).
"""
