"""Exit codes of errors: a launched run distinguishes a user's mistake, which repeats, from a fault
of another process, after which the same command can continue."""

from __future__ import annotations

import pytest

from roadtrain import cli
from roadtrain.errors import AuthError, ConfigError, DeadlineError, LostError, RoadtrainError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such key"), 2),
        (AuthError("another token"), 2),
        (LostError("server 1 has ended"), 3),
        (DeadlineError("worker 0 did not come"), 3),
    ],
)
def test_exit_codes(error: RoadtrainError, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "run", fails)
    assert cli.main(["train", "job.toml"]) == code  # Rule 5
