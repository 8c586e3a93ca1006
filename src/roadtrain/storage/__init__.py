"""How bytes rest: direct I/O, two slots for each record, checksums, ledgers, snapshots.

A committed step survives a kill and a power cut at any moment (Rule 3), and a damaged byte is an
error that names its file. Read `tier.py` first (what a store of records does), then `file.py` and
`ledger.py`.
"""
