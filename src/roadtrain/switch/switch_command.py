"""`roadtrain serve HOST:PORT --switch`: from what the user wrote to a SwitchHost that runs."""

from __future__ import annotations

import contextlib

from roadtrain.errors import ConfigError
from roadtrain.switch.options import MOST_JOBS
from roadtrain.switch.switch import SwitchHost
from roadtrain.switch.switch_table import TableDevice
from roadtrain.transport.listener import Report
from roadtrain.transport.plugins import load, plugin_names
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import MIB, parse_bytes, show_bytes

MEMORY = 256 * MIB  # where none is said
TABLES = "roadtrain.switch_tables"  # entry points: a device's name -> TableDevice, or why not


def serve_switch(
    address: Address,
    memory: str | None,
    options: TcpOptions,
    xdp: str | None = None,
    report: Report = print,
) -> int:
    """Serve a switch until it is ended.

    Args:
        memory: Bytes for the tables and sockets of all jobs (256MiB).
        xdp: The network device in whose driver packets are summed; where that cannot be, a line
            says why.
    """
    nbytes = MEMORY if memory is None else parse_bytes(memory)
    device = None if xdp is None else _opened(xdp)
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


def _opened(device: str) -> TableDevice | str:
    """The program in the kernel, attached to the device; or a line: why not. Raises ConfigError
    where no installed distribution has one."""
    if "xdp" not in plugin_names(TABLES):
        raise ConfigError(
            f"--xdp {device}: sums in the kernel are a plugin, and it is not installed",
            hint="pip install ./plugins/switch_offload (the distribution roadtrain-switch-offload)",
        )
    opened: TableDevice | str = load(TABLES, "xdp")(device)
    return opened
