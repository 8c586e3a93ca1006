"""The product of options that users combine: each case has the same bits in RAM and on one or three
directories, also after a resume with another layout (Rules 1 and 3), and trains as plain torch
does."""

import functools
import itertools

import numpy as np
import pytest
import torch

from tests.support.models import Case, build, contents, new_scaler, place, run

STEPS = 5
# Six rows in which every pair of ten options occurs in each of its four combinations: a row without
# options and five rows, of which each option is in a different three.
IN_ROWS = [*itertools.combinations(range(1, 6), 3)]
PAIRWISE = [tuple(row in rows for rows in IN_ROWS[:6]) for row in range(6)]
CASES = [
    pytest.param(
        Case(
            accumulate=3 if on[0] else 1,
            clip=0.5 if on[1] else None,
            groups=on[2],
            frozen=on[3],
            tied=on[4],
            scaler=on[5],
        ),
        marks=() if on in PAIRWISE else pytest.mark.exhaustive,
    )
    for on in itertools.product((False, True), repeat=6)
]
MORE = [
    Case(dtype=torch.bfloat16, accumulate=2, clip=1.0),
    Case(dtype=torch.bfloat16, eager=True),
    Case(eager=True, accumulate=2),
    Case(dtype=torch.float16, scaler=True),
]
LATE = [
    Case(staleness=1),
    Case(staleness=1, dtype=torch.bfloat16, eager=True),
    Case(staleness=1, accumulate=2, clip=0.5, groups=True, frozen=True, tied=True),
    Case(staleness=1, dtype=torch.bfloat16, scaler=True, clip=0.5),
]


def name(case):
    return "-".join(f"{k}={v}" for k, v in vars(case).items() if v) or "plain"


def test_every_pair_of_options_occurs_in_each_combination():
    for first, second in itertools.combinations(zip(*PAIRWISE), 2):
        assert len({*zip(first, second)}) == 4


@functools.cache
def in_memory(case):
    return placed_run(case, None)


def placed_run(case, store, **options):
    model, placed, scaler = place(case, store, **options)
    losses = run(case, model, placed, scaler, 0, STEPS)
    values = contents(model, placed)
    placed.close()
    return losses, values


def resumed_run(case, tmp_path):
    """Run two steps in one directory, two with other chunks and less memory, and the rest in three
    directories."""
    losses = []
    layouts = [
        (tmp_path / "a", {}, 2),
        (tmp_path / "a", {"chunk_elements": 1 << 16, "host_budget": "160MiB"}, 4),
        ([tmp_path / d for d in "abc"], {}, STEPS),
    ]
    if case.staleness:  # such a store keeps its layout
        layouts = [
            (tmp_path / "a", {"host_budget": b}, until)
            for b, until in (("1GiB", 2), ("160MiB", 4), (None, STEPS))
        ]
    for store, options, until in layouts:
        model, placed, scaler = place(case, store, seed=7 if losses else 0, **options)
        losses += run(case, model, placed, scaler, placed.steps_done, until)
        values = contents(model, placed)
        placed.close()
    return losses, values


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for key in a[1]:
        assert np.array_equal(a[1][key], b[1][key], equal_nan=True), key


@pytest.mark.parametrize("case", [*CASES, *MORE, *LATE], ids=name)
def test_a_case_has_the_same_bits_on_every_placement(case, tmp_path):  # Rule 1
    ram = in_memory(case)
    assert_same(ram, placed_run(case, tmp_path / "one"))
    assert_same(
        ram, placed_run(case, [tmp_path / f"d{i}" for i in range(3)], chunk_elements=1 << 16)
    )
    if case.eager and not case.staleness:
        return
    assert_same(ram, resumed_run(case, tmp_path))


@pytest.mark.parametrize("case", [*CASES, *(case for case in MORE if case.dtype is None)], ids=name)
def test_a_case_trains_as_plain_torch(case):
    model, optimizer = build(case)
    losses = run(case, model, optimizer, new_scaler(case), 0, STEPS)
    placed = in_memory(case)[0]
    assert np.allclose(losses, placed, rtol=0, atol=2e-4)
    assert losses[0] == placed[0]


def test_waiting_gradients_are_spilled_under_a_small_budget(tmp_path):  # Rule 4
    case = Case(accumulate=2, clip=0.5)
    ram = in_memory(case)
    assert_same(ram, placed_run(case, tmp_path / "s", host_budget="45MiB", chunk_elements=1 << 16))
