"""Lookup of the hardware address to which a network device sends packets for a host. This module
sends no packets.

The address is read from the kernel's tables of routes and neighbors, in the network namespace of
the calling thread. The kernel fills these tables when other packets are sent to the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import socket
import struct
import subprocess
from pathlib import Path

from roadtrain.errors import ConfigError

ROUTE_S = 10.0
_HARDWARE_ADDRESS = 0x8927  # SIOCGIFHWADDR
_ETHTOOL = 0x8946  # SIOCETHTOOL
_DRIVER, _DRIVER_NBYTES = 3, 196  # ETHTOOL_GDRVINFO and the size of struct ethtool_drvinfo
_BUS_AT = 100  # offset of the field bus_info in the struct
_COMPLETE = 2  # ATF_COM: the neighbour's hardware address is resolved


def ipv4(host: str) -> str:
    """Return the IPv4 address of a host. Raises ConfigError if the host has no IPv4 address."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{host} has no IPv4 address: {error.strerror}") from None


def next_hop(host: str, device: str) -> str | None:
    """Return the IP address of the next hop of packets for `host`: a gateway or the host itself.
    Returns None if packets for `host` leave through another device, or if the route is unknown."""
    words = ["ip", "-json", "route", "get", ipv4(host)]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        output = subprocess.run(words, capture_output=True, check=True, timeout=ROUTE_S).stdout
        (route,) = json.loads(output)
        if route.get("dev") == device:
            return str(route.get("gateway", route["dst"]))
    return None


def neighbour(address: str, device: str) -> bytes | None:
    """Return the hardware address of the neighbor with this IP address, or None if this host has
    not resolved it yet."""
    for line in Path("/proc/thread-self/net/arp").read_text().splitlines()[1:]:
        at, _, flags, hardware, _, through = line.split()
        if at == address and through == device and int(flags, 16) & _COMPLETE:
            return bytes.fromhex(hardware.replace(":", ""))
    return None


def hardware_address(device: str) -> bytes:
    """Return the hardware address of a device of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", device.encode())
        return fcntl.ioctl(any_socket, _HARDWARE_ADDRESS, request)[18:24]


def is_hardware(device: str) -> bool:
    """Return whether the device is hardware: the driver of the device reports a bus, such as
    PCI."""
    reply = ctypes.create_string_buffer(struct.pack("I", _DRIVER), _DRIVER_NBYTES)
    request = struct.pack("16sP", device.encode(), ctypes.addressof(reply)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _ETHTOOL, request)
        except OSError:
            return False
    return reply.raw[_BUS_AT] != 0
