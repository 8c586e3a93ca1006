"""The network chosen for a group of ranks, the cards found on a host, and the settings of NCCL."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from roadtrain.errors import ConfigError, LostError
from roadtrain.options.schema import checked
from roadtrain.stages import host_cards as networks
from roadtrain.stages import process_groups
from roadtrain.stages.networks import (
    CONTROL,
    ETHERNET,
    INFINIBAND,
    INSIDE,
    ROCE,
    HostCard,
    HostCards,
    NetworkStatement,
    choose_networks,
    fastest_common,
    override,
    pick,
)
from roadtrain.stages.process_groups import check_device, nccl_network


@dataclass(frozen=True)
class Ranks:
    name: str
    ranks: tuple[int, ...]


def card(interface, address, kind=ETHERNET, rate=0.0, **more):
    return HostCard(interface, address, 16, kind=kind, bytes_per_s=rate, **more)


def host(name, *cards):
    return HostCards(f"id of {name}", name, cards)


def holmes():
    """Two clusters of two hosts (Yang et al., section 2.4, case 2), two ranks a host."""
    out = []
    for cluster, kind, net in (("a", INFINIBAND, 1), ("b", ROCE, 2)):
        for i in (1, 2):
            n = i + 2 * (net - 1)
            own = host(
                f"{cluster}{i - 1}",
                card("eth0", f"10.{net}.0.{n}", kind, 100e6),
                card("eth1", f"10.3.1.{n}", ETHERNET, 6e6),
            )
            out += [own, own]
    return out


def test_each_group_takes_the_network_of_the_printed_rule() -> None:
    """Yang et al. (Holmes), section 3.2: tensor groups inside a host, data groups by RDMA inside
    their cluster, pipelines by Ethernet between clusters."""
    groups = [
        Ranks("tp", (0, 1)),
        Ranks("dp a", (0, 2)),
        Ranks("dp b", (5, 7)),
        Ranks("pp", (0, 4)),
    ]
    chosen = choose_networks(groups, holmes())
    assert {name: network.kind for name, network in chosen.items()} == {
        CONTROL: ETHERNET,
        "tp": INSIDE,
        "dp a": INFINIBAND,
        "dp b": ROCE,
        "pp": ETHERNET,
    }
    assert [card.address for card in chosen["dp b"].cards] == ["10.2.0.3", "10.2.0.4"]
    assert chosen["pp"].card_of(4).address == "10.3.1.3"
    assert chosen["tp"].card_of(1).address == "127.0.0.1"
    # Rule 6: unused faster cards are reported
    assert "infiniband of a0, roce of b0" in str(chosen["pp"])
    assert str(chosen["dp a"]) == "dp a: infiniband at 100 MB/s (eth0 of a0 a1)"


def test_equal_kinds_of_cards_need_not_share_a_network() -> None:
    hosts = holmes()
    two_fabrics = [
        replace(host, cards=(replace(host.cards[0], kind=INFINIBAND), host.cards[1]))
        for host in hosts
    ]
    assert pick(Ranks("dp", (0, 4)), dict(enumerate(two_fabrics))).kind == ETHERNET
    joined = override(
        two_fabrics, [NetworkStatement(interface="eth0", kind=INFINIBAND, fabric="hall")]
    )
    assert pick(Ranks("dp", (0, 4)), dict(enumerate(joined))).kind == INFINIBAND


def test_known_rates_take_precedence_over_kinds() -> None:
    slow, fast = card("ib0", "10.1.0.1", INFINIBAND, 1e9), card("eth0", "10.3.0.1", rate=12e9)
    both = [slow, fast], [replace(slow, address="10.1.0.2"), replace(fast, address="10.3.0.2")]

    def chosen(cards):
        return fastest_common(cards, lambda card: card.fabric_id, lambda card: card.bytes_per_s)[
            0
        ].kind

    assert chosen(both) == ETHERNET
    unknown = [[card if card.kind == INFINIBAND else replace(card, bytes_per_s=0) for card in cards]
               for cards in both]  # fmt: skip
    assert chosen(unknown) == INFINIBAND


def test_hosts_of_infiniband_and_of_roce_alone_are_refused() -> None:
    hosts = {rank: replace(host, cards=host.cards[:1]) for rank, host in enumerate(holmes())}
    with pytest.raises(ConfigError, match=r"InfiniBand and RoCE cards cannot talk.*no Ethernet"):
        pick(Ranks("dp 0", (0, 4)), hosts)
    assert pick(Ranks("dp 0", (0, 2)), hosts).kind == INFINIBAND


def test_a_fabric_of_two_kinds_is_refused() -> None:
    mixed = override(holmes(), [NetworkStatement(interface="eth0", fabric="fast")])
    with pytest.raises(ConfigError, match="fabric fast has eth0 of host a1, which is infiniband"):
        choose_networks([Ranks("pp", (2, 4))], mixed)


def test_roce_stays_inside_its_subnet_and_ethernet_is_routed() -> None:
    roce, plain = host("a", card("p0", "10.1.0.1", ROCE)), host("b", card("p0", "10.1.0.2"))
    far = host("c", card("p0", "10.9.0.1"))
    assert pick(Ranks("g", (0, 1)), {0: roce, 1: plain}).kind == ETHERNET
    assert pick(Ranks("g", (0, 1)), {0: plain, 1: far}).kind == ETHERNET
    with pytest.raises(ConfigError, match=r"no network in common.*c has p0"):
        pick(Ranks("g", (0, 1)), {0: roce, 1: far})


def test_statements() -> None:
    plain = [
        replace(host, cards=tuple(replace(c, kind=ETHERNET, bytes_per_s=0) for c in host.cards))
        for host in holmes()
    ]
    statements = [
        checked(NetworkStatement, tree)
        for tree in (
            {"hosts": "a*", "interface": "eth0", "kind": "infiniband", "rate": "800Mbit/s"},
            {"subnet": "10.2.0.0/16", "kind": "roce", "rate": "600Mbit/s"},
            {"hosts": ["b1"], "interface": "eth1", "use": False},
        )
    ]
    a, b = override(plain, statements)[0], override(plain, statements)[-1]
    assert [(c.kind, c.bytes_per_s) for c in a.cards] == [(INFINIBAND, 100e6), (ETHERNET, 0)]
    assert [(c.kind, c.bytes_per_s) for c in b.cards] == [(ROCE, 75e6)]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"hosts": "b1", "interface": "eth7", "kind": "roce"}, "host b1 has no interface eth7"),
        ({"interface": "ib*", "kind": "infiniband"}, "interface ib.*no card matches"),
        ({"subnet": "10.9.0.0/16", "kind": "roce"}, "subnet 10.9.0.0/16.*no card matches"),
        ({"hosts": "a1", "interface": "eth0", "kind": "roce"}, "its link layer is infiniband"),
    ],
)
def test_invalid_statements_are_refused(tree, reason) -> None:
    hosts = [
        replace(host, cards=tuple(replace(c, found="" if c.kind == ETHERNET else c.kind)
                                 for c in host.cards))
        for host in holmes()
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=reason):
        override(hosts, [checked(NetworkStatement, tree)])


@pytest.mark.parametrize("tree", [{}, {"kind": "roce"}, {"subnet": "10.1.0.7/16"}, {"subent": "x"}])
def test_meaningless_statements_are_refused(tree) -> None:
    with pytest.raises(ConfigError):
        checked(NetworkStatement, tree)


def test_an_address_shared_by_several_hosts_is_ignored() -> None:
    docker = card("docker0", "172.17.0.1")
    a, b = (replace(host, cards=(docker, *host.cards)) for host in (holmes()[0], holmes()[2]))
    assert [c.interface for c in override([a, a, b], [])[2].cards] == ["eth0", "eth1"]
    assert len(override([a, a], [])[0].cards) == 3


def test_settings_of_nccl() -> None:
    chosen = choose_networks(
        [Ranks("tp", (0, 1)), Ranks("dp", (0, 2)), Ranks("pp", (2, 4))], holmes()
    )
    assert nccl_network(chosen["tp"], 0, {}).net_name is None
    ib, socket = nccl_network(chosen["dp"], 0, {}), nccl_network(chosen["pp"], 2, {})
    assert (ib.net_name, socket.net_name) == ("IB", "Socket")
    assert "NCCL_IB_HCA is not set" in ib.unbound  # Rule 6
    assert "eth1 cannot be set per group: NCCL_SOCKET_IFNAME is not set" in socket.unbound
    assert not nccl_network(chosen["pp"], 2, {"NCCL_SOCKET_IFNAME": "=eth1"}).unbound
    assert "'eth9'" in nccl_network(chosen["pp"], 2, {"NCCL_SOCKET_IFNAME": "eth9"}).unbound


def test_a_failed_connection_names_ranks_and_network(monkeypatch) -> None:  # Rule 5
    def fails(*_, **__):
        raise RuntimeError("connectFullMesh failed\nC++ stack")

    monkeypatch.setattr(process_groups.dist, "init_process_group", fails)
    control = choose_networks([], holmes())[CONTROL]
    with pytest.raises(LostError, match=r"control did not .* 7 s .*rank 7 at .* of b1\): connect"):
        process_groups.start_processes(control, None, 0, 8, 7.0)


def interface(mac, address, speed=1000, family=None, netmask="255.255.0.0"):
    return (
        [
            SimpleNamespace(family=psutil.AF_LINK, address=mac, netmask=None),
            SimpleNamespace(family=family or socket.AF_INET, address=address, netmask=netmask),
        ],
        SimpleNamespace(isup=True, speed=speed, mtu=1500),
    )


def test_cards_of_a_host(tmp_path, monkeypatch) -> None:
    """A host with one card of each kind, a bridge, and an interface of another namespace."""
    have = {
        "lo": interface("00", "127.0.0.1"),
        "ib0": interface("a0", "10.1.0.1", 0),
        "ens1": interface("a1", "10.2.0.1"),
        "eth0": interface("a2", "10.3.0.1", 25000),
        "docker0": interface("a3", "172.17.0.1"),
        # as on hosts of virtual machines: a card is a port of the bridge
        "br0": interface("a7", "10.6.0.1"),
        "eth1": interface("a5", "fd00::5%eth1", family=socket.AF_INET6, netmask="ffff:ffff::"),
        "eth2": interface("a6", "fe80::5", family=socket.AF_INET6, netmask="ffff:ffff::"),
        "ib9": interface("a4", "10.4.0.1"),
    }
    for name, (addresses, _) in have.items():
        path = tmp_path / "class/net" / name
        path.mkdir(parents=True)
        (path / "address").write_text(addresses[0].address if name != "ib9" else "elsewhere")
        (path / "type").write_text("32\n" if name.startswith("ib") else "1\n")
    for bridge, port in (("docker0", "veth0"), ("br0", "eno1")):
        (tmp_path / "class/net" / bridge / "bridge").mkdir()
        (tmp_path / "class/net" / bridge / "brif" / port).mkdir(parents=True)
    (tmp_path / "class/net/eno1/device").mkdir(parents=True)
    for device, layer, rate, name in (
        ("mlx5_0", "InfiniBand", "200 Gb/sec (4X HDR)", "ib0"),
        ("mlx5_1", "Ethernet", "100 Gb/sec (4X EDR)", "ens1"),
    ):
        port = tmp_path / "class/infiniband" / device / "ports/1"
        (port / "gid_attrs/ndevs").mkdir(parents=True)
        (port / "link_layer").write_text(layer + "\n")
        (port / "rate").write_text(rate + "\n")
        (port / "gid_attrs/ndevs/0").write_text(name + "\n")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {k: v[0] for k, v in have.items()})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {k: v[1] for k, v in have.items()})
    have["eth0"][0].append(interface("a2", "10.5.0.1")[0][1])  # its second address
    have["eth0"][0].append(interface("a2", "fd00::1", family=socket.AF_INET6)[0][1])
    found = networks.this_host(tmp_path)
    assert [(c.interface, c.kind, c.bytes_per_s, c.device, c.subnet) for c in found.cards] == [
        ("ib0", INFINIBAND, 25e9, "mlx5_0", "10.1.0.0/16"),
        ("ens1", ROCE, 12.5e9, "mlx5_1", "10.2.0.0/16"),
        ("eth0", ETHERNET, 3.125e9, "", "10.3.0.0/16"),
        ("eth0", ETHERNET, 3.125e9, "", "10.5.0.0/16"),
        ("br0", ETHERNET, 125e6, "", "10.6.0.0/16"),
        ("eth1", ETHERNET, 125e6, "", "fd00::/32"),
        ("ib9", ETHERNET, 125e6, "", "10.4.0.0/16"),  # sysfs shows another card of that name
    ]


def test_a_device_without_collectives_is_refused() -> None:  # Rule 6
    for device in ("cpu", "cuda:1"):
        check_device(torch.device(device))
    with pytest.raises(ConfigError, match=r"would compute on xpu:1, but supports only CUDA .* CPU"):
        check_device(torch.device("xpu:1"))
