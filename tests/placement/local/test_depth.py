"""Peak memory does not follow the number of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.placement import depth


@pytest.mark.exhaustive
def test_peak_memory_of_four_times_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4. The blocks added weigh 38 MB in parameters alone, and left to itself glibc's heap
    would grow by more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    few, many = depth.measure((4, 16), 256, "96MiB", depth.REPS)
    assert many["parameters"] > 3.5 * few["parameters"]
    assert depth.growth(few, many) < 0.05
    assert few["resident"] <= 96 << 20 and many["resident"] <= 96 << 20
