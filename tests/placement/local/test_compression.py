"""Top-k gradients are lossy but give the same loss on every placement and after every resume (Rules
1 to 3)."""

import numpy as np
import pytest
import torch

import roadtrain
from roadtrain import TopK
from roadtrain.errors import LoopError
from tests.support.models import Case, build, contents, place, run

STEPS = 6


def losses_of(case, store, stops=(STEPS,), **options):
    losses = []
    for stop in stops:
        model, placed, scaler = place(case, store, seed=7 if losses else 0, **options)
        losses += run(case, model, placed, scaler, placed.steps_done, stop)
        values = contents(model, placed)
        placed.close()
    return losses, values


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    "case", [Case(), Case(clip=0.5, groups=True), Case(eager=True), Case(scaler=True)], ids=str
)
def test_losses_do_not_depend_on_placement_or_resumes(case, feedback, tmp_path):  # Rules 1, 3
    options = {"compress": TopK(0.05, error_feedback=feedback)}
    ram = losses_of(case, None, **options)
    three = losses_of(case, [tmp_path / d for d in "abc"], (2, 4, STEPS), **options)
    assert ram[0] == three[0]
    for key, value in ram[1].items():
        assert np.array_equal(value, three[1][key]), key


def test_compression_and_feedback_change_the_losses_after_the_first_step():
    plain = losses_of(Case(), None)[0]
    without = losses_of(Case(), None, compress=TopK(0.05))[0]
    with_feedback = losses_of(Case(), None, compress=TopK(0.05, error_feedback=True))[0]
    assert plain[0] == without[0] == with_feedback[0]
    assert len({tuple(plain), tuple(without), tuple(with_feedback)}) == 3


def test_bytes_sent_include_the_indices():  # c = 2 f for fp32: keeping 5 % sends 10 %
    model, placed, scaler = place(Case(), None, compress=TopK(0.05))
    run(Case(), model, placed, scaler, 0, 1)
    dense = sum(4 * p.numel() for p in model.parameters())
    sent = placed.session.worker.compressor.sent_bytes
    assert abs(sent / dense - 0.1) < 0.002
    placed.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_keeping_nearly_all_values_is_close_to_plain_training(dtype):
    case = Case(accumulate=2, clip=0.5, dtype=dtype)
    plain, compressed = losses_of(case, None)[0], losses_of(case, None, compress=TopK(0.99))[0]
    assert np.allclose(plain, compressed, rtol=0, atol=0.05), (plain, compressed)
    norms = []
    for options in ({}, {"compress": TopK(0.99)}):
        model, placed, scaler = place(case, None, **options)
        run(case, model, placed, scaler, 0, 1)
        norms.append(placed.grad_norm())
        placed.close()
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_feedback_with_a_second_backward_pass_is_refused():
    model, placed, scaler = place(
        Case(accumulate=2), None, compress=TopK(0.05, error_feedback=True)
    )
    with pytest.raises(LoopError, match="this is the second pass"):
        run(Case(accumulate=2), model, placed, scaler, 0, 1)
    placed.close()


def test_compression_is_reported_as_lossy_at_the_start():  # Rule 2
    lines = []
    model, optimizer = build(Case())
    placed = roadtrain.place(model, optimizer, compress=TopK(0.01), report=lines.append)
    placed.close()
    assert any("lossy" in line for line in lines)
