"""`roadtrain serve HOST:PORT --switch`: parse the options and run a SwitchHost."""

from __future__ import annotations

import contextlib

from roadtrain.errors import ConfigError
from roadtrain.servers.prometheus import Expose
from roadtrain.switch.options import MOST_JOBS
from roadtrain.switch.switch import SwitchHost
from roadtrain.switch.switch_table import TableDevice
from roadtrain.transport.listener import Report
from roadtrain.transport.plugins import load, plugin_names
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import MIB, parse_bytes, show_bytes

MEMORY = 256 * MIB  # default of --memory
# Entry point group; "xdp" is a function: network device -> TableDevice, or why that is impossible.
TABLES = "roadtrain.switch_tables"


def serve_switch(
    address: Address,
    memory: str | None,
    options: TcpOptions,
    xdp: str | None = None,
    expose: Expose = contextlib.nullcontext,
    report: Report = print,
) -> int:
    """Run a switch until the process is interrupted.

    Args:
        memory: Memory for the tables and sockets of all jobs, such as "1GiB"; default 256MiB.
        xdp: The network device whose driver sums the packets (XDP). If it cannot, the reason is
            reported, and this process sums.
        expose: Called with the switch's status; its context exposes the status to Prometheus.
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
            f" {host.quota.free_slots} slots or fewer; no state is kept on disk"
        )
        with expose(host.status):
            host.run()
    return 0


def _opened(device: str) -> TableDevice | str:
    """Return the network device that sums in the kernel, or the reason why it cannot. Raises
    ConfigError if the plugin is not installed.
    """
    if "xdp" not in plugin_names(TABLES):
        raise ConfigError(
            f"--xdp {device}: summing in the kernel needs a plugin that is not installed",
            hint="pip install ./plugins/switch_offload (the distribution roadtrain-switch-offload)",
        )
    opened: TableDevice | str = load(TABLES, "xdp")(device)
    return opened
