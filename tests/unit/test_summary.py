"""The table at the end of a run: what it says limited a step."""

from __future__ import annotations

import pytest

from roadtrain.config.job import make_job
from roadtrain.config.machines import LAUNCHED_AS
from roadtrain.training.summary import Summary, Totals, going_on, rows

MODEL = {"model": {"config": {"model_type": "llama"}}}
FILES = {"store": {"files": ["a", "b"]}}
SERVERS = {"servers": {"addresses": ["localhost:7000"]}}


def line(**stages: float) -> dict[str, object]:
    """A line of metrics.jsonl of a step of ten seconds."""
    said = {name: {"seconds": seconds, "bytes": 0} for name, seconds in stages.items()}
    return {"loss": 1.0, "seconds": 10.0, "stages": said}


@pytest.mark.parametrize(
    ("config", "stages", "limit"),
    [
        # Eight threads that read and write beside each other are busy for longer than the step.
        (FILES, {"Wait": 1.0, "Read": 35.0, "Write": 35.0, "Update": 3.0}, "computing"),
        (FILES, {"Wait": 8.0, "Read": 35.0, "Write": 35.0, "Update": 3.0}, "files"),
        (FILES, {"Wait": 8.0, "Read": 5.0, "Write": 5.0, "Sum": 4.0, "Update": 15.0}, "updates"),
        ({}, {"Wait": 8.0, "Update": 9.0}, "updates"),
        (SERVERS, {"Wait": 8.0, "Update": 0.0}, "servers and network"),
    ],
)
def test_what_limited_a_step(
    config: dict[str, object], stages: dict[str, float], limit: str
) -> None:
    job, totals = make_job({**MODEL, **config}), Totals()
    for _ in range(3):
        totals.add(line(**stages), 0)
    table = dict(rows(job, Summary(3, 2.0, 1.0, None, ""), totals, 1, "roadtrain"))
    waited = stages["Wait"]
    assert table["a step took"] == (
        f"10.0 s: computing {10 - waited:.1f} s, waiting {waited:.1f} s; limited by {limit}"
    )


def test_a_launched_run_is_gone_on_with_by_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, done = (Summary(3, 2.0, 1.0, None, why) for why in ("interrupted", ""))
    assert going_on(stopped, "roadtrain train job.toml") == "roadtrain train job.toml"
    monkeypatch.setenv(LAUNCHED_AS, "first")
    assert going_on(stopped, "roadtrain train job.toml") == "roadtrain launch --resume first"
    assert "run.steps" in going_on(done, "") and going_on(done, "").endswith("--name first")
