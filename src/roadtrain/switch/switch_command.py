"""`roadtrain serve HOST:PORT --switch`: from what the user wrote to a SwitchHost that runs."""

from __future__ import annotations

import contextlib

from roadtrain.switch.options import MOST_JOBS
from roadtrain.switch.switch import SwitchHost
from roadtrain.switch.xdp import XdpDevice
from roadtrain.transport.listener import Report
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import MIB, show_bytes

MEMORY = 256 * MIB  # where none is said


def serve_switch(
    address: Address,
    nbytes: int,
    options: TcpOptions,
    report: Report = print,
    xdp: str | None = None,
) -> int:
    """Until it is ended. nbytes: of memory for the tables and sockets of all jobs. xdp: the network
    device in whose driver packets are summed; where that cannot be, a line says why."""
    device = None if xdp is None else XdpDevice.opened(xdp)
    if isinstance(device, str):
        report(device)
        device = None
    with (
        contextlib.nullcontext() if device is None else contextlib.closing(device),
        SwitchHost(address, nbytes, options, report, device) as host,
    ):
        if device is not None:
            report(f"sums in the kernel on {device.name}, {device.mode} XDP")
        report(
            f"summing and copying packets at {host.where}, datagrams at UDP ports"
            f" {host.port + 1} to {host.port + MOST_JOBS}, at most {show_bytes(nbytes)} for"
            f" {host.quota.free_slots} slots or fewer; nothing rests here"
        )
        host.run()
    return 0
