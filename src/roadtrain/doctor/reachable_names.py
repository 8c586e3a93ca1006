"""Checks of network cards, host names and servers."""

from __future__ import annotations

import importlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from roadtrain.doctor.diagnosis import Diagnosis, Level, PeerAnswer, Subject
from roadtrain.environment import local_rank_of
from roadtrain.errors import ConfigError, PeerError
from roadtrain.stages.host_cards import this_host
from roadtrain.stages.networks import override
from roadtrain.transport.address import address_of, tls_of, token_of
from roadtrain.transport.tcp import TcpOptions

_WRONG: Level = "wrong"
GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"


def resolve(name: str) -> list[str]:
    """Return the IP addresses of a host name; an empty list if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(info[4][0]).partition("%")[0] for info in found})


def is_local(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(ip).is_loopback for ip in addresses)


def several_hosts(subject: Subject) -> bool:
    """Return whether the run has more hosts than this one, as far as the environment and the
    servers' addresses tell."""
    world = subject.environ.get("WORLD_SIZE", "")
    _, local = local_rank_of(subject.environ)
    others = [host for host, _ in map(address_of, subject.peers)]
    return (world.isdigit() and int(world) > local) or any(
        not is_local(resolve(host)) for host in others
    )


def matching(name: str, value: str, interfaces: list[str]) -> list[str]:
    """Return the interfaces that the value of an environment variable selects, as the library that
    reads it does: NCCL matches prefixes, unless there is a `=`; `^` excludes."""
    if name != NCCL:
        return [i for i in interfaces if i in value.split(",")]
    exclude, value = value.startswith("^"), value.lstrip("^")
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    found = [i for i in interfaces if any(i == n if exact else i.startswith(n) for n in names)]
    return [i for i in interfaces if i not in found] if exclude else found


def check_interfaces(subject: Subject) -> Iterator[Diagnosis]:
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    usable = [card.interface for card in this_host().cards]
    names = ", ".join(dict.fromkeys(usable)) or "none"
    for name in (GLOO, NCCL, TENSORPIPE):
        if not (value := subject.environ.get(name, "")):
            continue
        found = matching(name, value, list(states))
        up = [interface for interface in found if states[interface].isup]
        families = (socket.AF_INET, socket.AF_INET6)
        why, level = "", _WRONG
        if not found:
            why = "no such interface is here"
        elif not up:
            why = f"{', '.join(found)} is down"
        elif not any(entry.family in families for i in up for entry in addresses.get(i, ())):
            why = f"{', '.join(up)} has no IP address"
        elif all(is_local([_first_ip(addresses[i])]) for i in up):
            why = f"{', '.join(up)} reaches only this host"
            level = _WRONG if several_hosts(subject) else "note"
        if why:
            fix = f"export {name} with an interface that is up ({names}), or unset it"
            what = f"{name}={value}: {why}"
            yield Diagnosis("interface", level, what, fix)
    for statement in subject.job.parallelism.networks if subject.job else ():
        if statement.matches_host(socket.gethostname()):
            try:
                override([this_host()], [statement])
            except ConfigError as error:
                # a pattern may be meant for other hosts
                level = "note" if set(statement.interface) & set("*?[") else "wrong"
                fix = error.hint or f"name one of this host's interfaces ({names})"
                yield Diagnosis("interface", level, str(error).partition("\nhint: ")[0], fix)


def _first_ip(entries: list[Any]) -> str:
    families = (socket.AF_INET, socket.AF_INET6)
    return next((e.address.partition("%")[0] for e in entries if e.family in families), "::")


def check_names(subject: Subject) -> Iterator[Diagnosis]:
    own = socket.gethostname()
    found, several = resolve(own), several_hosts(subject)
    chosen = subject.environ.get(GLOO)
    if (not found or is_local(found)) and not chosen:
        where = f"resolves to {', '.join(found)}" if found else "does not resolve"
        cards = this_host().cards
        name = cards[0].interface if cards else "INTERFACE"
        yield Diagnosis(
            "host-name",
            "wrong" if several else "note",
            f"the host name {own} {where}: torch's gloo would give the other hosts an address that"
            " they cannot reach",
            f"map {own} to its network card's address in /etc/hosts, or export {GLOO}={name}; a"
            " single host needs neither",
        )
    if several and not this_host().cards:
        what = "the run has several hosts, but no network card of this host has an address"
        yield Diagnosis("host-name", "wrong", what, "`ip address` lists the cards and their state")
    master = subject.environ.get("MASTER_ADDR", "")
    if master and not (at := resolve(master)):
        what = f"MASTER_ADDR={master} does not resolve"
        yield Diagnosis("host-name", "wrong", what, "name host 0 by an address, or in /etc/hosts")
    elif master and several and is_local(at):
        what = f"MASTER_ADDR={master} is {at[0]}: each host would wait for itself"
        yield Diagnosis("host-name", "wrong", what, "name host 0 by an address of its card")


def check_token(subject: Subject) -> Iterator[Diagnosis]:
    try:
        token_of(subject.token_file)
    except ConfigError as error:
        fix = error.hint or "name the file with the job's token"
        yield Diagnosis("token", "wrong", str(error).partition("\nhint: ")[0], fix)


def ask_peer(subject: Subject, peer: str) -> PeerAnswer:
    """Ask a server for its status and clock."""
    servers: Any = subject.job.servers if subject.job else None
    tls = tls_of(servers.cert, servers.key, servers.ca) if servers else None
    health = importlib.import_module("roadtrain.servers.health")  # imports numba, in 0.7 s
    try:
        options = TcpOptions(token=token_of(subject.token_file), tls=tls)
    except ConfigError:  # check_token reports it
        options = TcpOptions(tls=tls)
    status, ahead_s = health.ask_with_clock(address_of(peer), options)
    if isinstance(status, PeerError):
        return PeerAnswer(str(status).replace("\nhint: ", "; "), answered=False)
    return PeerAnswer(status[0].splitlines()[0], True, ahead_s)


def check_peers(subject: Subject) -> Iterator[Diagnosis]:
    for peer, answer in subject.answers.items():
        if not answer.answered:
            host, port = address_of(peer)
            fix = f"start `roadtrain serve {peer}` there, open port {port}, and use the same token"
            if not resolve(host):
                fix = f"{host} does not resolve: write its address"
            yield Diagnosis("server", "wrong", f"server {peer}: {answer.text}", fix)
