"""The choice of the devices of a host that sum for the others, with the cases of Jiang et al.
(BytePS, OSDI 2020), section 4.2."""

from __future__ import annotations

from roadtrain.sums.protocol.host_roots import choose

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]


def at(switch: int, function: int) -> str:
    """Path of a PCI function below a port of the CPU; each port stands for a switch."""
    bus = f"0000:{switch:02x}"
    return f"/sys/devices/pci{bus}/{bus}:01.0/{bus}:02.{function}"


def devices(*switches: tuple[int, ...]) -> list[str]:
    """Devices in numerical order, where switch i has the devices `switches[i]`."""
    switch_of = {number: i for i, own in enumerate(switches) for number in own}
    return [at(switch_of[number], number) for number in sorted(switch_of)]


def test_all_devices_sum_if_the_card_has_its_own_lanes() -> None:
    """Figure 6: four devices per switch and the card on its own lanes."""
    assert choose(devices((0, 1, 2, 3), (4, 5, 6, 7)), [at(2, 0)]) == [*range(8)]


def test_a_single_switch() -> None:
    assert choose(devices((0, 1, 2, 3)), []) == [0, 1, 2, 3]
    assert choose(devices((0, 1, 2, 3)), [at(0, 7)]) == [0, 1, 2, 3]


def test_the_card_beside_two_of_eight_devices() -> None:
    """Figure 8: the roots are not on the switch of the card."""
    assert choose(devices(*PAIRS), [at(0, 7)]) == [*range(2, 8)]


def test_as_many_cards_as_switches_is_symmetric() -> None:
    assert choose(devices(*PAIRS), [at(switch, 7) for switch in range(4)]) == [*range(8)]


def test_several_cards_only_change_which_switches_have_one() -> None:
    assert choose(devices(*PAIRS), [at(0, 7), at(1, 7)]) == [4, 5, 6, 7]


def test_the_roots_are_in_order_for_any_numbering_of_switches() -> None:
    assert choose(devices((1, 4), (0, 5), (2, 3)), [at(2, 7)]) == [0, 1, 4, 5]


def test_a_host_without_devices_has_no_roots() -> None:
    assert choose([], []) == choose([], [at(0, 0)]) == []


def test_the_machine_is_read_from_sys() -> None:
    gpus = [
        "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
        "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:04.0/0000:04:00.0",
        "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0",
    ]
    nics = [
        "/sys/devices/pci0000:80/0000:80:01.0/0000:82:00.0/net/eth0",
        "/sys/devices/virtual/net/lo",
    ]
    assert choose(gpus, nics) == [0, 1]


def test_devices_outside_pci_count_as_separate_ports() -> None:
    soc = [f"/sys/devices/platform/{name}" for name in ("gpu0", "gpu1", "gpu2")]
    assert choose(soc, [soc[1]]) == [0, 2]
