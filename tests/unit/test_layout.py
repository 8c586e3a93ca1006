"""spec/layout.py and flow/pipeline.py: the groups of Yang et al. (Holmes), uneven stages, one forward one backward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadtrain.errors import ConfigError
from roadtrain.flow.pipeline import BACKWARD, FORWARD, Run, StageDecider, one_forward_one_backward
from roadtrain.spec.layout import Layout, even, uneven


def test_the_papers_groups() -> None:
    """N = 16, d = 2, t = 2, p = 4, counted from 1 as printed."""
    layout = Layout(dp=2, tp=2, pp=4)

    def printed(groups: list[list[int]]) -> list[set[int]]:
        return [{rank + 1 for rank in group} for group in groups]

    assert printed(layout.tensor_groups()) == [{i, i + 1} for i in range(1, 16, 2)]
    assert printed(layout.pipeline_groups()) == [{1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}, {4, 8, 12, 16}]
    assert printed(layout.data_groups()) == [{1, 3}, {2, 4}, {5, 7}, {6, 8}, {9, 11}, {10, 12}, {13, 15}, {14, 16}]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_each_family_has_every_device_once(dp: int, tp: int, pp: int) -> None:
    layout = Layout(dp, tp, pp)
    for groups in (layout.tensor_groups(), layout.pipeline_groups(), layout.data_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.devices))


def test_layouts_that_cannot_be() -> None:
    """H3: p = 3 leaves devices over on 32, and crosses the clusters' border on 48."""
    with pytest.raises(ConfigError, match="30 devices, there are 32"):
        Layout(dp=10, pp=3).check([8] * 4)
    with pytest.raises(ConfigError, match="crosses the border between clusters after device 24"):
        Layout(dp=16, pp=3).check([8] * 6, [3, 3])
    Layout(dp=24, pp=2).check([8] * 6, [3, 3])
    with pytest.raises(ConfigError, match="16 does not fit a host of 8"):
        Layout(dp=2, tp=16).check([8] * 4)


def test_uneven_stages_are_the_papers() -> None:
    """Equation 4, alpha = 1.05, with the speeds of Table 3."""
    assert uneven(30, (197, 160)) == (17, 13) and uneven(30, (197, 160), alpha=1.0) == (16, 14)
    assert uneven(36, (189, 185)) == (19, 17) and uneven(36, (189, 185), alpha=1.0) == (18, 18)


def test_uneven_stages_fit_the_memory() -> None:
    assert uneven(30, (197, 160), fits=lambda cluster, n: n <= (15, 20)[cluster]) == (15, 15)
    with pytest.raises(ConfigError, match="30 layers do not fit"):
        uneven(30, (197, 160), fits=lambda cluster, n: n <= 10)


@given(st.integers(2, 60), st.lists(st.floats(1, 100), min_size=1, max_size=4))
def test_uneven_stages_have_every_layer(layers: int, speeds: list[float]) -> None:
    if layers < len(speeds):
        return
    out = uneven(layers, speeds)
    assert sum(out) == layers and min(out) >= 1


def test_layers_of_stages() -> None:
    assert even(10, 3) == (4, 3, 3)
    with pytest.raises(ConfigError, match="stages of 4, 5 layers are 2 with 9 layers in all, the model has 10 for 2"):
        Layout(pp=2, stages=(4, 5)).layers(10)
    with pytest.raises(ConfigError, match="2 layers cannot be 3 stages"):
        even(2, 3)


def test_one_forward_one_backward() -> None:
    order = one_forward_one_backward(1, 4, 4)
    assert "".join(run.what[0] + str(run.micro) for run in order) == "F0F1F2B0F3B1B2B3"
    assert [run.last for run in order] == [False] * 7 + [True]


@given(st.integers(1, 6), st.integers(1, 8), st.randoms(use_true_random=False))
def test_stages_that_talk_finish(stages: int, micros: int, random: object) -> None:
    """However messages arrive, every stage runs every micro-batch once each way and holds no more than its depth."""
    deciders = [StageDecider(s, stages, micros) for s in range(stages)]
    todo: list[tuple[int, Run]] = [(s, run) for s, decider in enumerate(deciders) for run in decider.start()]
    done: list[tuple[int, str, int]] = []
    while todo:
        stage, run = todo.pop(random.randrange(len(todo)))  # type: ignore[attr-defined]
        done.append((stage, run.what, run.micro))
        todo += [(stage, other) for other in deciders[stage].ended(run)]
        to = stage + (1 if run.what == FORWARD else -1)
        if 0 <= to < stages:
            todo += [(to, other) for other in deciders[to].arrived(run.what, run.micro)]
        for decider in deciders:
            decider.check()
    assert all(decider.finished for decider in deciders)
    both = (FORWARD, BACKWARD)
    assert sorted(done) == sorted((s, what, m) for s in range(stages) for what in both for m in range(micros))
