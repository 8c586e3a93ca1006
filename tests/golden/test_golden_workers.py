"""Two workers of a host on two servers: losses, norms and the contents of the servers are
unchanged."""

from __future__ import annotations

from pathlib import Path

import cases
import fixtures
import workers


def test_two_workers(tmp_path: Path) -> None:
    found = workers.run(tmp_path)
    fixtures.same_arithmetic(cases.Variant())
    assert found == fixtures.load("workers.json")
