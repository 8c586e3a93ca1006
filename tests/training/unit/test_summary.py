"""The printed line of each step and the table at the end of a run."""

from __future__ import annotations

import re

import pytest

from roadtrain.config.job import make_job
from roadtrain.config.machines import LAUNCHED_AS
from roadtrain.training.progress import describe, shares
from roadtrain.training.run_lines import RunLines
from roadtrain.training.summary import Summary, resume_command, rows
from roadtrain.units import show_seconds

MODEL = {"model": {"config": {"model_type": "llama"}}}
FILES = {"store": {"files": ["a", "b"]}}
SERVERS = {"servers": {"addresses": ["localhost:7000"]}}


def line(**stages: float) -> dict[str, object]:
    """A line of metrics.jsonl for a step of ten seconds."""
    entries = {name: {"seconds": seconds, "bytes": 0} for name, seconds in stages.items()}
    memory = {"host": {"bytes": 50 << 20, "budget": 1 << 30}}
    return {"loss": 1.0, "seconds": 10.0, "tokens": 100, "stages": entries, "memory": memory}


@pytest.mark.parametrize(
    ("config", "stages", "limit"),
    [
        # Eight threads that read and write in parallel are busy for longer than the step.
        (FILES, {"Wait": 1.0, "Read": 35.0, "Write": 35.0, "Update": 3.0}, "computing"),
        (FILES, {"Wait": 8.0, "Read": 35.0, "Write": 35.0, "Update": 3.0}, "files"),
        (FILES, {"Wait": 8.0, "Read": 5.0, "Write": 5.0, "Sum": 4.0, "Update": 15.0}, "updates"),
        ({}, {"Wait": 8.0, "Update": 9.0}, "updates"),
        (SERVERS, {"Wait": 8.0, "Update": 0.0}, "servers and network"),
    ],
)
def test_the_bottleneck_of_a_step_is_named(
    config: dict[str, object], stages: dict[str, float], limit: str
) -> None:
    job, lines = make_job({**MODEL, **config}), RunLines()
    for _ in range(3):
        lines.add(line(**stages))
    table = dict(rows(job, Summary(3, 2.0, 1.0, None, ""), lines, 1, "roadtrain"))
    waited = stages["Wait"]
    assert table["a step took"] == (
        f"10 s: computing {show_seconds(10 - waited)}, waiting {show_seconds(waited)};"
        f" limited by {limit}"
    )
    assert describe(job, line(**stages)).endswith(f", limited by {limit}")


@pytest.mark.parametrize(
    ("seconds", "busy", "shown"),
    [
        # stages in other threads do not count as part of the step
        (
            10.0,
            {"Forward": 1.2, "Backward": 1.5, "Wait": 7.3, "Fetch": 0.9, "Sum": 8.4},
            (12, 15, 73),
        ),
        (10.0, {"Forward": 3.335, "Backward": 3.335, "Wait": 3.33}, (34, 33, 33)),
        (10.0, {"Forward": 1.0, "Backward": 2.0}, (10, 20, 70)),
        # lines of earlier versions, whose Forward and Backward include waits
        (10.0, {"Forward": 4.0, "Backward": 6.0, "Wait": 8.0}, (22, 33, 45)),
        (0.0, {}, ()),
    ],
)
def test_the_shares_of_a_step_add_up(
    seconds: float, busy: dict[str, float], shown: tuple[int, ...]
) -> None:
    found = shares(seconds, busy)
    assert tuple(found.values()) == shown and sum(shown) in (0, 100)
    job = make_job({**MODEL, **FILES})
    text = describe(job, line(**busy) | {"seconds": seconds, "tokens": 5})
    assert sum(map(int, re.findall(r"(\d+)%", text))) in (0, 100)


def test_held_memory_is_compared_with_plain_training_if_it_is_less() -> None:
    job, lines = make_job({**MODEL, **FILES}), RunLines()
    lines.add(line(Wait=1.0))
    for plain, held in [(100 << 20, "50.0 MiB, 50% of that"), (2 << 20, "50.0 MiB")]:
        table = dict(rows(job, Summary(1, 2.0, 1.0, None, ""), lines, plain, "roadtrain"))
        assert table["roadtrain held at most"] == held


def test_the_resume_command_of_a_launched_run_uses_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped, done = (Summary(3, 2.0, 1.0, None, why) for why in ("interrupted", ""))
    assert resume_command(stopped, "roadtrain train job.toml") == "roadtrain train job.toml"
    monkeypatch.setenv(LAUNCHED_AS, "first")
    assert resume_command(stopped, "roadtrain train job.toml") == "roadtrain launch --resume first"
    assert "run.steps" in resume_command(done, "") and resume_command(done, "").endswith(
        "--name first"
    )
