"""Checks of network cards, host names and servers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from roadtrain.doctor.diagnosis import Diagnosis, Subject, diagnose
from roadtrain.environment import local_rank_of
from roadtrain.errors import ConfigError, PeerError
from roadtrain.servers import health
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.networks import override
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.tcp import TcpOptions

GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"


def resolve(name: str) -> list[str]:
    """Return the IP addresses of a host name; an empty list if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(info[4][0]).partition("%")[0] for info in found})


def is_local(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(ip).is_loopback for ip in addresses)


def several_hosts(subject: Subject) -> bool:
    """Return whether the launcher has started workers on other hosts, too."""
    world = subject.environ.get("WORLD_SIZE", "")
    return world.isdigit() and int(world) > local_rank_of(subject.environ)[1]


def matching(name: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that the value of an environment variable selects, as the library that
    reads it does: NCCL matches prefixes, unless there is a `=`; `^` excludes."""
    if name != NCCL:
        return [i for i in interfaces if i in value.split(",")]
    exclude, value = value.startswith("^"), value.lstrip("^")
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    found = [i for i in interfaces if any(i == n if exact else i.startswith(n) for n in names)]
    return [i for i in interfaces if i not in found] if exclude else found


def check_interfaces(subject: Subject) -> Iterator[Diagnosis]:
    cards = this_host().cards
    names = ", ".join(dict.fromkeys(card.interface for card in cards)) or "none is up"
    for name in (GLOO, NCCL, TENSORPIPE):
        if (value := subject.environ.get(name)) and (why := _why_unreachable(name, value)):
            harmless = "only this host" in why and not several_hosts(subject)
            level = "note" if harmless else "wrong"
            yield diagnose("interface", level, name=f"{name}={value}", why=why, names=names)
    for statement in subject.job.parallelism.networks if subject.job else ():
        if statement.matches_host(socket.gethostname()):
            try:
                override([this_host()], [statement])
            except ConfigError as error:
                # a pattern may be meant for other hosts
                level = "note" if set(statement.interface) & set("*?[") else "wrong"
                why = str(error).partition("\nhint: ")[0]
                name = "parallelism.networks"
                yield diagnose("interface", level, name=name, why=why, names=names)


def _why_unreachable(name: str, value: str) -> str:
    """Return the reason why other hosts cannot reach this one by the interfaces that an environment
    variable selects, or "" if they can."""
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    found = matching(name, value, list(states))
    up = [interface for interface in found if states[interface].isup]
    entries = [entry for i in up for entry in psutil.net_if_addrs().get(i, ())]
    addresses = [e.address.partition("%")[0] for e in entries if e.family in families]
    if not up:
        return f"{', '.join(found)} is down" if found else "there is no such interface"
    if not addresses:
        return f"{', '.join(up)} has no IP address"
    return f"{', '.join(up)} reaches only this host" if is_local(addresses) else ""


def check_names(subject: Subject) -> Iterator[Diagnosis]:
    if not several_hosts(subject):
        return
    own, leader = socket.gethostname(), subject.environ.get("MASTER_ADDR")
    if not subject.environ.get(GLOO) and (where := _why_useless(own)):
        yield diagnose("host-name", own=own, where=where)
    if leader and (where := _why_useless(leader)):
        yield diagnose("host-name/leader", own=leader, where=where)


def _why_useless(name: str) -> str:
    """Return the reason why other hosts cannot reach a host by its name, or "" if they can."""
    if not (found := resolve(name)):
        return "does not resolve"
    return f"resolves to {', '.join(found)}" if is_local(found) else ""


def check_token(subject: Subject) -> Iterator[Diagnosis]:
    try:
        token_of(subject.token_file)
    except ConfigError as error:
        hint = error.hint or "name the file with the job's token"
        yield diagnose("token", why=str(error).partition("\nhint: ")[0], hint=hint)


def ask_peer(subject: Subject, peer: str) -> float | str:
    """Ask a server for its clock. Returns the seconds by which it is ahead, or the reason why the
    server does not answer."""
    servers: Any = subject.job.servers if subject.job else None
    try:
        tls = tls_of(servers.cert, servers.key, servers.ca) if servers else None
        options = TcpOptions(token=token_of(subject.token_file), tls=tls)
    except ConfigError as error:
        return f"not asked: {error}".partition("\nhint: ")[0]
    status, ahead_s = health.ask_with_clock(address_of(peer), options)
    failed = isinstance(status, PeerError)
    return str(status).replace("\nhint: ", "; ") if failed else ahead_s or 0.0


def check_peers(subject: Subject) -> Iterator[Diagnosis]:
    own = {card.address for card in this_host().cards}
    for peer, answer in subject.answers.items():
        host, port = address_of(peer)
        here = is_local(found := resolve(host)) or own & {*found}
        if not isinstance(answer, str):
            continue
        if here and (other := _listener(port)):
            pid, name = other.pid, other.name()
            yield diagnose("port", peer=peer, port=port, pid=pid, name=name)
        else:
            yield diagnose("server", peer=peer, why=answer)


def _listener(port: int) -> psutil.Process | None:
    """Return the process that listens at a TCP port of this host, unless it is roadtrain's."""
    for socket_ in psutil.net_connections("tcp"):
        if socket_.status == psutil.CONN_LISTEN and socket_.laddr.port == port and socket_.pid:
            process = psutil.Process(socket_.pid)
            return None if "roadtrain" in " ".join(process.cmdline()) else process
    return None
