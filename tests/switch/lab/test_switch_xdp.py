"""`roadtrain serve --switch --xdp eth0` between hosts of the lab: the kernel sums, user space
copies and communicates, and nothing changes for the job's end and workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from roadtrain.lab import LabNic, Network, network_available
from roadtrain.switch.switch import SwitchHost
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import MIB
from roadtrain_switch_offload.xdp import XdpDevice
from roadtrain_switch_offload.xdp_table import XdpTable
from tests.support.fan_in_fakes import (
    TOKEN,
    End,
    Peer,
    Worker,
    copies_are_right,
    pumped,
    sums_are_right,
)
from tests.support.host_thread import HostThread
from tests.support.needs import no_xdp

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
COUNT, WORKERS = 300, 2


class Scene:
    """A switch that sums in the kernel, an end and workers, each on a separate host."""

    def __init__(self, network: Network, stack: contextlib.ExitStack) -> None:
        self._network, self._stack = network, stack
        self.threads = {
            name: stack.enter_context(HostThread(host.net)) for name, host in network.hosts.items()
        }
        device = self.threads["switch"].do(XdpDevice.opened, "eth0")
        if isinstance(device, str):
            no_xdp(device)
        stack.callback(device.close)
        here = network.hosts["switch"].address
        self.switch: SwitchHost = stack.enter_context(
            self.threads["switch"].do(
                lambda: SwitchHost((here, 0), 32 * MIB, TcpOptions(token=TOKEN), print, device)
            )
        )
        self.host = here

    def job(self, number: int) -> tuple[End, list[Worker]]:
        end = self._on("end", lambda host: End(number, f"job{number}", host=host))
        port = self.threads["end"].do(end.register, (self.host, self.switch.port), WORKERS)
        return end, [
            self._on(
                f"w{rank}",
                lambda host, rank=rank: Worker(
                    end.key, number, rank, rank, (self.host, port), host=host
                ),
            )
            for rank in range(WORKERS)
        ]

    def _on(self, name: str, make) -> Peer:
        peer = self.threads[name].do(make, self._network.hosts[name].address)
        self._stack.callback(peer.close)
        return peer


@pytest.fixture
def scene() -> Iterator[Scene]:
    names = ("switch", "end", *(f"w{rank}" for rank in range(WORKERS)))
    nics = {name: [LabNic(50e6)] for name in names}
    with Network(nics) as network, contextlib.ExitStack() as stack:
        yield Scene(network, stack)


def test_the_kernel_sums_and_user_space_does_the_rest(scene: Scene) -> None:
    jobs = [scene.job(number) for number in (7, 8)]
    for end, workers in jobs:
        peers = [end, *workers]
        for peer in peers:
            peer.sender.may_send(COUNT)
        assert pumped(peers, lambda: all(len(p.got) == COUNT for p in peers), 60.0)  # noqa: B023
        sums_are_right(end, range(WORKERS), COUNT)
        copies_are_right(workers, COUNT)
    for job in scene.switch.jobs:
        assert isinstance(job.table, XdpTable)
        assert job.table.counters["completed"] == COUNT
    rows = "\n".join(scene.switch.jobs[0].rows())
    assert f"{COUNT} sums" in rows
    jobs[0][0].leave()
    assert pumped([], lambda: scene.switch.quota.used_slots == jobs[1][0].receiver.depth)
