"""Two workers of one host on two servers: their losses and norms, and what the servers hold, are what they were."""

from __future__ import annotations

from pathlib import Path

import cases
import fixtures
import workers


def test_two_workers(tmp_path: Path) -> None:
    found = workers.run(tmp_path)
    fixtures.same_arithmetic(cases.Variant())
    assert found == fixtures.load("workers.json")
