"""Storage of a job's state: direct I/O, two slots per record, checksums, ledgers, snapshots.

A committed step survives a kill and a power cut at any moment, and a damaged byte raises an error
that names its file. Read `tier.py` first (the operations of a store), then `file.py` and
`ledger.py`.
"""
