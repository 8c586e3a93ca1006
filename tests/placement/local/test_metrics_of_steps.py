"""Measurements of the last step for custom loops, by PlacedOptimizer.metrics()."""

from __future__ import annotations

import roadtrain
from tests.support.models import Case, one_step, place


def test_the_words_are_those_of_a_metrics_line(tmp_path):
    case = Case()
    model, placed, scaler = place(case, tmp_path / "store", host_budget="1GiB")
    with placed:
        for step in (1, 2):
            one_step(case, model, placed, scaler, step)
            line = placed.metrics()
            assert (line["step"], line["grad_norm"]) == (step, placed.grad_norm())
            assert step - 2 <= line["committed"] <= step
            assert line["stages"]["Fetch"]["bytes"] > 0 and line["stages"]["Fetch"]["seconds"] > 0
            assert "lossy" not in line
        placed.flush()
        line = placed.metrics()
        assert line["committed"] == 2 and "Forward" not in line["stages"]
        used = {name: entry["bytes"] for name, entry in line["memory"].items()}
        assert set(used) == {"host", "process", "disk"}
        assert used["host"] == placed.memory()["resident"] + placed.memory()["activations"]
        assert line["memory"]["host"]["budget"] == 1 << 30
        files = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
        assert files - (64 << 10) <= used["disk"] <= files  # store.json and CURRENT are not counted
        assert line["memory"]["disk"]["budget"] > used["disk"]
        flat = placed.metrics(flat=True)
        assert flat["memory/host/bytes"] == used["host"] and flat["step"] == 2


def test_a_state_in_ram_has_no_disk_and_lossy_options_are_named():
    """Rule 2."""
    case = Case(staleness=1)
    model, placed, scaler = place(case, None, compress=roadtrain.TopK(0.1))
    with placed:
        one_step(case, model, placed, scaler, 1)
        line = placed.metrics()
    assert "disk" not in line["memory"]
    assert line["lossy"] == {"staleness": 1, "keep": 0.1, "error_feedback": False}
    assert line["grad_norm"] is None  # waiting for it would end the delay
