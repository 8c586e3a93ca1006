"""SpareHosts: the user's list of hosts that sum but do not train. `watch` follows the list during
training. Does NOT start hosts."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roadtrain.errors import ConfigError, PeerError
from roadtrain.servers import health
from roadtrain.sums.coordinator import Coordinator
from roadtrain.sums.protocol.shares import optimum
from roadtrain.transport.address import address_of
from roadtrain.transport.tcp import TcpOptions, Tls

CHECK_S = 1.0  # interval between reads of the list
RETRY_S, MOST_RETRY_S = 2.0, 300.0  # first and longest wait before a host is tried again


@dataclass(frozen=True)
class SpareHosts:
    """The spare hosts that the user has listed.

    Args:
        spares: Addresses, or the path of a file that lists addresses and may change.
        rates: Relative link rates of the spare hosts, in the order of `spares`. If None, all rates
            are equal.
        token: Token of the spare hosts. The token for links between workers is derived from it.
        tls: TLS options for links to spare hosts and between workers of different hosts.
    """

    spares: Sequence[str] | str
    rates: Sequence[float] | None
    token: bytes | None = field(repr=False)
    tls: Tls | None = None

    def own_token(self) -> bytes | None:
        """Derive the token for links between workers. Returns None if there is no token."""
        return self.token and hmac.digest(
            self.token, b"roadtrain: workers of a summation", "sha256"
        )

    def now(self) -> dict[str, float]:
        """Return the current list of spare hosts: address -> rate. Raises ConfigError."""
        if isinstance(self.spares, str):
            return self._read(Path(self.spares))
        rates = self.rates or [1.0] * len(self.spares)
        if len(rates) != len(self.spares):
            raise ConfigError(
                f"{len(self.spares)} spare hosts are given, but {len(rates)} `spare_rates`",
                hint="give one rate for each spare host",
            )
        return {spare: rate for spare, rate in zip(self.spares, rates) if address_of(spare)}

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        try:
            lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
            found = {words[0]: float(words[1]) if words[1:] else 1.0 for words in lines if words}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the spare hosts in {path}: {error}",
                hint="write a line per host: HOST:PORT, then the host's rate if it is not 1",
            ) from error
        for address, rate in found.items():
            address_of(address)
            optimum([1.0], [rate])
        return found


def watch(hosts: SpareHosts, coordinator: Coordinator, options: TcpOptions) -> Callable[[], None]:
    """Watch the list of spare hosts in a thread. A new host is offered to the coordinator once the
    host answers. A host that is no longer listed is removed. Returns a function that ends the
    thread."""
    # address -> (time of the next attempt, seconds from that attempt to the following one)
    over, attempts = threading.Event(), dict[str, tuple[float, float]]()
    silent = dict[str, str]()  # address -> last reported reason why the host does not answer

    def due(address: str) -> bool:
        """Return whether to try to reach a host now. The waits between attempts grow."""
        at, wait_s = attempts.get(address, (0.0, RETRY_S))
        if found := time.monotonic() >= at:
            attempts[address] = time.monotonic() + wait_s, min(2 * wait_s, MOST_RETRY_S)
        return found

    def answers(address: str) -> bool:
        found = health.ask(address_of(address), options)
        why = str(found).splitlines()[0] if isinstance(found, PeerError) else ""
        if why and silent.get(address) != why:
            coordinator.report(f"spare host {address} will be used once it answers: {why}")
        silent[address] = why
        return not why

    def check() -> None:
        while not over.wait(CHECK_S):
            try:
                now = hosts.now()
            except ConfigError as error:
                if due(""):
                    coordinator.report(f"spare hosts are not changed: {error}")
                continue
            there = [group.spares for group in coordinator.groups]
            for group, spares in zip(coordinator.groups, there):
                for address in spares.keys() - now.keys():
                    why = f"spare host {address} is no longer listed"
                    group.lost_reducer(spares[address], why)
            for address in now.keys() - set.intersection(*map(set, there)):
                if due(address) and answers(address):
                    for group in coordinator.groups:
                        group.offered(address, now[address])

    thread = threading.Thread(target=check, name="spare hosts", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
