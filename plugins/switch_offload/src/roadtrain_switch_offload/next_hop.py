"""Whom a network device hands a packet for some host to: the hardware address, from the kernel's
routes and neighbours, of the calling thread's network namespace. Asks nobody on the network: who
sends to the host now and then makes it known.
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
_DRIVER, _DRIVER_NBYTES = 3, 196  # ETHTOOL_GDRVINFO and its struct
_BUS_AT = 100  # after the command, and names and versions of driver and firmware
_COMPLETE = 2  # ATF_COM of a neighbour: its hardware address is known


def ipv4(host: str) -> str:
    """Raises ConfigError for a host without such an address."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"{host} has no IPv4 address: {error.strerror}") from None


def next_hop(host: str, device: str) -> str | None:
    """The address on the device's own network that packets for `host` go to; None where they leave
    by another device, or nobody can say."""
    words = ["ip", "-json", "route", "get", ipv4(host)]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(words, capture_output=True, check=True, timeout=ROUTE_S).stdout
        (route,) = json.loads(said)
        if route.get("dev") == device:
            return str(route.get("gateway", route["dst"]))
    return None


def neighbour(address: str, device: str) -> bytes | None:
    """Its hardware address, where this host knows it."""
    for line in Path("/proc/thread-self/net/arp").read_text().splitlines()[1:]:
        at, _, flags, hardware, _, through = line.split()
        if at == address and through == device and int(flags, 16) & _COMPLETE:
            return bytes.fromhex(hardware.replace(":", ""))
    return None


def hardware_address(device: str) -> bytes:
    """The device's own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", device.encode())
        return fcntl.ioctl(any_socket, _HARDWARE_ADDRESS, asked)[18:24]


def is_hardware(device: str) -> bool:
    """Whether it is on a bus, as its driver says."""
    said = ctypes.create_string_buffer(struct.pack("I", _DRIVER), _DRIVER_NBYTES)
    asked = struct.pack("16sP", device.encode(), ctypes.addressof(said)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _ETHTOOL, asked)
        except OSError:
            return False
    return said.raw[_BUS_AT] != 0
