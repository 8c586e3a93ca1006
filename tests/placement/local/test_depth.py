"""Peak memory does not depend on the number of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.placement import depth


@pytest.mark.exhaustive
def test_peak_memory_does_not_grow_with_the_number_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4. The added blocks have 38 MB of parameters, and glibc's heap would grow by more than that
    without limits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few, many = depth.measure((4, 16), 256, "96MiB", depth.REPS)
    assert many["parameters"] > 3.5 * few["parameters"]
    assert depth.growth(few, many) < 0.05
    assert few["resident"] <= 96 << 20 and many["resident"] <= 96 << 20
