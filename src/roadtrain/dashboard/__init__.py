"""`roadtrain show RUN`: pictures of a run, while it trains and afterwards.

The room reads the files of run directories and asks servers for their status; it never writes to a
run. Read `watch.py` first: it collects everything that the pages show. `alerts.py` judges it,
`drawing.py` and `tables.py` draw it, and `show.py` serves it.
"""
