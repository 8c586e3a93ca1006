"""State machines of switches, and of senders and receivers of their streams: events in, actions
out.
"""
