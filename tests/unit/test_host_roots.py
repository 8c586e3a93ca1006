"""Which devices of a host sum for the others: the cases of Jiang et al. (BytePS, OSDI 2020),
section 4.2."""

from __future__ import annotations

from roadtrain.sums.protocol.host_roots import PcieSwitch, choose, switches_of

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_pcie_only_two_switches_and_a_card_of_its_own() -> None:
    """Figure 6: four devices a switch, the card on its own lanes: all devices sum."""
    switches = [PcieSwitch((0, 1, 2, 3)), PcieSwitch((4, 5, 6, 7)), PcieSwitch((), nic=True)]
    assert choose(switches) == tuple(range(8))


def test_one_switch() -> None:
    assert choose([PcieSwitch((0, 1, 2, 3))]) == (0, 1, 2, 3)
    assert choose([PcieSwitch((0, 1, 2, 3), nic=True)]) == (0, 1, 2, 3)


def test_the_card_beside_two_of_eight_devices() -> None:
    """Figure 8: the roots are not on the card's switch."""
    assert choose([PcieSwitch(pair, nic=pair == (0, 1)) for pair in PAIRS]) == tuple(range(2, 8))


def test_as_many_cards_as_switches_is_symmetric() -> None:
    assert choose([PcieSwitch(pair, nic=True) for pair in PAIRS]) == tuple(range(8))


def test_several_cards_only_change_which_switches_have_one() -> None:
    assert choose([PcieSwitch(pair, nic=pair[0] < 4) for pair in PAIRS]) == (4, 5, 6, 7)


def test_the_machine_is_read_from_where_linux_puts_its_devices() -> None:
    gpus = [
        "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
        "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:04.0/0000:04:00.0",
        "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0",
    ]
    nics = [
        "/sys/devices/pci0000:80/0000:80:01.0/0000:82:00.0/net/eth0",
        "/sys/devices/virtual/net/lo",
    ]
    assert switches_of(gpus, nics) == [PcieSwitch((0, 1)), PcieSwitch((2,), nic=True)]
    assert choose(switches_of(gpus, nics)) == (0, 1)
