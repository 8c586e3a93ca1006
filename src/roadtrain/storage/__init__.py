"""Storage of a job's state: direct I/O, two slots per record, checksums, ledgers, snapshots.

A committed step survives a kill and a power cut at any moment. Reading a damaged byte raises an
error that names the damaged file. Start reading at `tier.py` (the rules of a store), then read
`file.py` and `ledger.py`.
"""
