"""Matching nodes of a Ray cluster with hosts of a plan by label, name or address; free nodes for
unnamed hosts; nodes that die, return or are drained."""

from __future__ import annotations

from random import Random

import pytest

from roadtrain.config.machines import PlanHost, ServerPlace
from roadtrain.launch.protocol.run_events import HostJoined, HostLeaving, HostLost
from roadtrain.launch.ray.nodes import HostMap, RayNode

STORE = (ServerPlace("/store", 7000),)


def node(
    node_id: str,
    *,
    name: str = "",
    address: str = "",
    label: str = "",
    processors: int = 4,
    devices: int = 0,
    leaves: float | None = None,
    head: bool = False,
) -> RayNode:
    address = address or f"10.1.0.{node_id}"
    return RayNode(
        node_id,
        name or address,
        address,
        "h" + node_id,
        label,
        processors,
        devices,
        leaves,
        head,
    )


def where(hosts: HostMap) -> dict[str, str]:
    return {name: node.node_id for name, node in hosts.hosts.items()}


def test_a_label_takes_precedence_over_a_name_and_a_name_over_an_address() -> None:
    hosts = HostMap([PlanHost("a", "k", "10.0.0.1"), PlanHost("b", "k"), PlanHost("c", "k")])
    nodes = [
        node("1", address="10.0.0.1"),
        node("2", name="b"),
        node("3", name="b", address="10.0.0.1", label="c"),
    ]
    assert hosts.look(nodes) == []
    assert where(hosts) == {"a": "1", "b": "2", "c": "3"}
    assert not hosts.missing()


def test_nodes_with_the_same_address_are_told_apart_by_label() -> None:
    """In `ray.cluster_utils` all nodes are the same machine."""
    hosts = HostMap([PlanHost("a", "k", "127.0.0.1"), PlanHost("b", "k", "127.0.0.1")])
    hosts.look([node("2", address="x", label="a"), node("1", address="x", label="b")])
    assert where(hosts) == {"a": "2", "b": "1"}


def test_unnamed_hosts_get_free_nodes_that_are_large_enough_in_a_stable_order() -> None:
    plan = [PlanHost("gpu0", "k", workers=2), PlanHost("gpu1", "k", workers=4), PlanHost("s", "k")]
    nodes = [node("1", head=True), node("2", devices=4), node("3", devices=2), node("4")]
    for _ in range(5):
        Random().shuffle(nodes)
        hosts = HostMap(plan)
        hosts.look(nodes)
        assert where(hosts) == {"gpu0": "3", "gpu1": "2", "s": "4"}  # the head comes last
    assert hosts.look(nodes) == []  # nodes that the plan does not use are not reported


@pytest.mark.parametrize("address", ["10.0.0.9", ""])
def test_a_host_without_a_node_is_missing(address: str) -> None:
    hosts = HostMap([PlanHost("a", "k", address, workers=8)])
    hosts.look([node("1", processors=4)])
    assert [host.name for host in hosts.missing()] == ["a"]


def test_a_dead_node_is_reported_and_a_new_node_with_its_label_replaces_it() -> None:
    hosts = HostMap([PlanHost("a", "k"), PlanHost("b", "k", servers=STORE)])
    hosts.look([node("1", label="a"), node("2", label="b")])
    assert hosts.look([node("1", label="a")], {"2": "no heartbeat"}.__getitem__) == [
        HostLost("b", "Ray's node 2: no heartbeat")
    ]
    assert hosts.look([node("1", label="a")]) == []
    back = [node("1", label="a"), node("9", label="b", address="10.2.0.2")]
    assert hosts.look(back) == [HostJoined("b", "10.2.0.2", 0)]
    hosts.check()


def test_a_free_node_never_takes_a_lost_hosts_name() -> None:
    """A replacement host must first learn which state of the run the lost host held."""
    plan = [PlanHost("w", "k", workers=2), PlanHost("s", "k", servers=STORE)]
    hosts = HostMap(plan)
    hosts.look([node("1", processors=2), node("2")])
    lost = hosts.look([])
    assert {event.host for event in lost if isinstance(event, HostLost)} == {"w", "s"}
    joined = hosts.look([node("7", processors=2)])
    assert joined == [HostJoined("10.1.0.7", "10.1.0.7", 2)]
    assert [host.name for host in hosts.missing()] == ["w", "s"]
    back = [node("7", processors=2), node("9", address="10.1.0.1")]  # at the address of w
    assert hosts.look(back) == [HostJoined("w", "10.1.0.1", 2)]
    hosts.check()


def test_an_idle_node_is_reported_when_a_host_with_workers_is_lost() -> None:
    plan = [PlanHost("w", "k", workers=2), PlanHost("s", "k", servers=STORE)]
    hosts, w, s = HostMap(plan), node("1", label="w"), node("2", label="s")
    idle = [node("3", processors=1), node("4"), node("5"), node("6", label="of another run")]
    assert hosts.look([w, s, *idle]) == []
    assert [type(event) for event in hosts.look([w, *idle])] == [HostLost]  # no node can replace s
    lost, joined = hosts.look(idle)
    assert isinstance(lost, HostLost) and lost.host == "w"
    assert joined == HostJoined("10.1.0.4", "10.1.0.4", 4)
    assert hosts.look(idle) == []  # one node for each lost host
    lost, joined = hosts.look([node for node in idle if node.node_id != "4"])
    assert isinstance(lost, HostLost) and lost.host == "10.1.0.4"
    assert isinstance(joined, HostJoined) and joined.host == "10.1.0.5"


def test_hosts_keep_their_nodes_from_the_previous_start() -> None:
    plan = [PlanHost(name, "k", workers=1) for name in "abc"]
    spare = PlanHost("d", "k", workers=1)
    earlier = {"a": "10.1.0.3", "b": "10.1.0.9", "c": "10.1.0.1", "d": "10.1.0.2"}
    hosts = HostMap(plan, [spare], earlier)
    events = hosts.look([node(str(n)) for n in range(1, 5)])
    assert where(hosts) == {"a": "3", "c": "1", "d": "2", "10.1.0.4": "4"}
    assert [host.name for host in hosts.missing()] == ["b"]  # not given another node
    assert events == [HostJoined("10.1.0.4", "10.1.0.4", 4)]
    assert [event.host for event in hosts.missing_events() if isinstance(event, HostLost)] == ["b"]
    assert hosts.look([node(str(n)) for n in (1, 2, 3, 4, 9)]) == [HostJoined("b", "10.1.0.9", 1)]


@pytest.mark.parametrize("devices", [0, 4])
def test_a_node_that_is_too_small_does_not_replace_the_host_of_its_label(devices: int) -> None:
    hosts = HostMap([PlanHost("w", "k", workers=4)])
    hosts.look([node("1", label="w", devices=devices)])
    hosts.look([])
    small = node("2", label="w", devices=3 if devices else 0, processors=4 if devices else 3)
    assert hosts.look([small]) == [HostJoined("2", "10.1.0.2", 3)]
    whole = node("3", label="w", devices=devices)
    assert hosts.look([small, whole]) == [HostJoined("w", "10.1.0.3", 4)]


def test_a_host_without_accelerators_is_replaced_by_its_label() -> None:
    hosts = HostMap([PlanHost("gpu", "k", workers=2), PlanHost("cpu", "k", workers=2)])
    gpu, cpu = node("1", label="gpu", devices=2), node("2", label="cpu")
    hosts.look([gpu, cpu])
    hosts.look([gpu])
    assert hosts.look([gpu, node("3", label="cpu")]) == [HostJoined("cpu", "10.1.0.3", 2)]


def test_a_host_keeps_its_address_in_the_plan() -> None:
    """The plan names the fast card; Ray knows another address."""
    hosts = HostMap([PlanHost("a", "k", "192.168.0.1"), PlanHost("b", "k")])
    hosts.look([node("1", label="a"), node("2", label="b")])
    assert (hosts.address_of("a"), hosts.address_of("b")) == ("192.168.0.1", "10.1.0.2")
    hosts.look([node("2", label="b")])
    (joined,) = hosts.look([node("3", label="a"), node("2", label="b")])
    assert isinstance(joined, HostJoined) and joined.address == "192.168.0.1"


def test_a_node_outside_the_plan_is_reported_under_its_own_name() -> None:
    hosts = HostMap([PlanHost("a", "k")])
    hosts.look([node("1", label="a")])
    events = hosts.look([node("1", label="a"), node("2", processors=3)])
    assert events == [HostJoined("10.1.0.2", "10.1.0.2", 3)]
    assert hosts.look([node("1", label="a")])[0] == HostLost(
        "10.1.0.2", "Ray's node 2: the node has died"
    )


def test_a_drained_node_leaves_once_and_gets_no_host() -> None:
    hosts = HostMap([PlanHost("a", "k"), PlanHost("b", "k")])
    drained = node("1", label="a", leaves=90.0)
    hosts.look([node("1", label="a")])
    assert hosts.look([drained]) == [HostLeaving("a", 90.0)]
    assert hosts.look([drained, node("2", leaves=5.0)]) == []
    assert where(hosts) == {"a": "1"}


@pytest.mark.parametrize(
    ("twin", "alias"),
    [
        (node("9", label="s"), "9"),
        (node("9", name="s"), "9"),
        (node("9", address="10.1.0.2"), "10.1.0.2"),  # the same machine, restarted
    ],
)
def test_a_node_that_joins_before_its_predecessor_is_reported_dead_replaces_it(
    twin: RayNode, alias: str
) -> None:
    """Ray reports a killed node as alive until several heartbeats are missing."""
    hosts = HostMap([PlanHost("w", "k", workers=2), PlanHost("s", "k", servers=STORE)])
    w, s = node("1", label="w"), node("2", address="10.1.0.2")
    hosts.look([w, s])
    [joined] = hosts.look([w, s, twin])
    assert isinstance(joined, HostJoined) and joined.host == alias
    assert hosts.look([w, twin]) == [
        HostLost("s", "Ray's node 2: the node has died"),
        HostLost(alias, "Ray's node 9 is now host s again"),
        HostJoined("s", twin.address, 0),
    ]
    assert where(hosts) == {"w": "1", "s": "9"}
    hosts.check()


def test_nodes_on_the_same_machine_are_separate_hosts() -> None:
    """In `ray.cluster_utils` a node that joins is a separate host."""
    hosts = HostMap([PlanHost("w", "k", workers=2), PlanHost("s", "k", servers=STORE)])
    w, s, more = (node(n, address="127.0.0.1") for n in "129")
    hosts.look([w, s])
    hosts.look([w, s, more])
    [lost] = hosts.look([w, more])
    assert isinstance(lost, HostLost) and lost.host == "s"
    assert "s" not in hosts.hosts
    hosts.check()


@pytest.mark.parametrize("seed", range(30))
def test_a_node_is_one_host_whatever_joins_and_leaves(seed: int) -> None:
    random = Random(seed)
    names = "abcd"
    plan = [
        PlanHost(name, "k", random.choice(["", f"10.1.0.{i}"]), random.randint(0, 2))
        for i, name in enumerate(names)
    ]
    hosts, there = HostMap(plan), {}
    joined: set[str] = set()
    for _at in range(40):
        if there and random.random() < 0.4:
            del there[random.choice(list(there))]
        else:
            new = str(random.randint(0, 99))
            there[new] = node(new, label=random.choice(["", "", *names]), devices=0)
        for event in hosts.look(list(there.values())):
            match event:
                case HostLost(host):
                    assert host not in hosts.hosts or hosts.hosts[host].node_id in there
                    joined.discard(host)
                case HostJoined(host):
                    joined.add(host)
        hosts.check()
        assert {node.node_id for node in hosts.hosts.values()} <= there.keys()
        assert joined <= hosts.hosts.keys()
