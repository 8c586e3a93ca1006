"""Several threads of a server copy, sum and update. They change no bit."""

import os

import pytest
import torch

from roadtrain import TopK
from tests.support.models import Case, contents, place, run

STEPS = 4


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(eager=True), {}),
        (Case(clip=0.5, accumulate=2, dtype=torch.bfloat16), {}),
        (Case(eager=True, staleness=1), {}),
        (Case(eager=True), {"compress": TopK(0.1, error_feedback=True)}),
    ],
    ids=["eager", "clipped bf16", "late", "top-k"],
)
@pytest.mark.parametrize("where", ["files", "RAM"])
def test_more_threads_change_no_bit(case, options, where, tmp_path, monkeypatch):  # Rule 1
    results = []
    for cores in (1, 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        store = tmp_path / str(cores) if where == "files" else None
        model, placed, scaler = place(case, store, **options)
        with placed:
            threads = {server.config.kernels for server in placed.session.servers.running}
            losses = run(case, model, placed, scaler, 0, STEPS)
            results.append((threads, losses, _bytes(model, placed)))
    (few, *by_few), (many, *by_many) = results
    assert by_few == by_many and max(few) == 1 < min(many)


def _bytes(model, placed):
    return {name: value.tobytes() for name, value in contents(model, placed).items()}
