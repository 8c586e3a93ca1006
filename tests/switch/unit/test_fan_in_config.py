"""switch/options.py: the tree of switches that a job sums in."""

from __future__ import annotations

import pytest

from roadtrain.errors import ConfigError
from roadtrain.switch.options import FanIn, SwitchNode, fan_in_of

ROOT = SwitchNode("root:1")
RACKS = (SwitchNode("rack0:1", "root:1", (0, 2)), SwitchNode("rack1:1", "root:1", (1, 3)))


def test_a_single_switch_has_all_workers() -> None:
    plan = fan_in_of(["10.0.0.1:7100"])
    plan.check(3)
    assert plan.place_of(2, 3) == (SwitchNode("10.0.0.1:7100"), 2)
    assert plan.children(plan.root, 3) == 3 and plan.width == 4


def test_a_tree_numbers_the_switches_below_before_the_workers() -> None:
    plan = FanIn((*RACKS, SwitchNode("root:1", "", (4,))))
    plan.check(5)
    assert plan.root.address == "root:1"
    assert [switch.address for switch in plan.from_root] == ["root:1", "rack0:1", "rack1:1"]
    assert plan.place_of(4, 5) == (plan.root, 2)
    assert plan.place_of(3, 5) == (RACKS[1], 1)
    assert plan.children(plan.root, 5) == 3


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ((), "has no switch"),
        ((ROOT, ROOT), "twice"),
        ((ROOT, SwitchNode("a:1")), "2 switches have no parent"),
        ((ROOT, SwitchNode("a:1", "b:1")), "not listed"),
        ((ROOT, SwitchNode("a:1", "b:1"), SwitchNode("b:1", "a:1")), "cycle"),
        ((SwitchNode("a:1", "b:1"), SwitchNode("b:1", "a:1")), "0 switches have no parent"),
    ],
)
def test_switches_that_form_no_tree_are_refused(
    switches: tuple[SwitchNode, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        FanIn(switches)


@pytest.mark.parametrize(
    "options", [{"wire": "int4"}, {"window": 7}, {"window": 100}, {"multicast": "on"}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"FanIn|fan_in"):
        fan_in_of(["a:1"], **options)


@pytest.mark.parametrize(
    ("workers", "words"), [(3, "workers 0 to 2"), (5, "workers 0 to 4"), (4, None)]
)
def test_each_worker_must_be_below_a_single_switch(workers: int, words: str | None) -> None:
    plan = FanIn((ROOT, *RACKS))
    if words is None:
        plan.check(workers)
        return
    with pytest.raises(ConfigError, match=words):
        plan.check(workers)


def test_a_switch_has_at_most_64_children() -> None:
    fan_in_of(["a:1"]).check(64)
    with pytest.raises(ConfigError, match="65 children"):
        fan_in_of(["a:1"]).check(65)


def test_switches_cannot_share_a_child() -> None:  # Rule 8
    plan = FanIn((*RACKS, SwitchNode("root:1", "", (4,))))
    names = [plan.first_child(s, 5) + i for s in plan.switches for i in range(plan.children(s, 5))]
    assert sorted(names) == list(range(len(names)))
