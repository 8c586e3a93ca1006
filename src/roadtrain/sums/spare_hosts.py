"""SpareHosts: hosts that sum and compute nothing, as the user lists them; watch: changes of the
list while training goes on.

Worker 0 looks at the list again and again, asks hosts that are new whether they answer, and has the
coordinator add them or leave them out. Does NOT start them.
"""

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

# between looks at the file, at hosts not there: first, last
LOOK_S, AGAIN_S, MOST_S = 1.0, 2.0, 300.0


@dataclass(frozen=True)
class SpareHosts:
    """The spare hosts that the user wants: a list, or a file that is read again and again.
    `token`: theirs, and what the workers' own is made of. `tls`: of spare hosts, and of workers to
    those on other hosts."""

    spares: Sequence[str] | str
    rates: Sequence[float] | None
    token: bytes | None = field(repr=False)
    tls: Tls | None = None

    def own_token(self) -> bytes | None:
        """Of the workers among themselves: spare hosts' token in another role."""
        return self.token and hmac.digest(
            self.token, b"roadtrain: workers of a summation", "sha256"
        )

    def now(self) -> dict[str, float]:
        """Address -> rate. Raises ConfigError."""
        if isinstance(self.spares, str):
            return self._read(Path(self.spares))
        rates = self.rates or [1.0] * len(self.spares)
        if len(rates) != len(self.spares):
            raise ConfigError(
                f"{len(rates)} rates for {len(self.spares)} spare hosts", hint="one for each"
            )
        return {spare: rate for spare, rate in zip(self.spares, rates) if address_of(spare)}

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        try:
            lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
            found = {words[0]: float(words[1]) if words[1:] else 1.0 for words in lines if words}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the spare hosts in {path}: {error}",
                hint="a line for each: HOST:PORT, then its rate if it is not 1",
            ) from error
        for address, rate in found.items():
            address_of(address)
            optimum([1.0], [rate])
        return found


def watch(wanted: SpareHosts, coordinator: Coordinator, options: TcpOptions) -> Callable[[], None]:
    """Offers spare hosts that are wanted, answer and are not there, has those left out that are
    not wanted any more. Returns what ends it."""
    # address -> next try, wait after
    over, again = threading.Event(), dict[str, tuple[float, float]]()
    silent = dict[str, str]()  # address -> why it does not answer, as it was said

    def due(address: str) -> bool:
        """Waits grow: a host that comes and goes costs more than it gives."""
        at, wait_s = again.get(address, (0.0, AGAIN_S))
        if found := time.monotonic() >= at:
            again[address] = time.monotonic() + wait_s, min(2 * wait_s, MOST_S)
        return found

    def answers(address: str) -> bool:
        found = health.ask(address_of(address), options)
        why = str(found).splitlines()[0] if isinstance(found, PeerError) else ""
        if why and silent.get(address) != why:
            coordinator.report(f"spare host {address} is used as soon as it answers: {why}")
        silent[address] = why
        return not why

    def look() -> None:
        while not over.wait(LOOK_S):
            try:
                now = wanted.now()
            except ConfigError as error:
                if due(""):
                    coordinator.report(f"spare hosts stay as they are: {error}")
                continue
            there = [group.spares for group in coordinator.groups]
            for group, spares in zip(coordinator.groups, there):
                for address in spares.keys() - now.keys():
                    why = f"spare host {address} is not wanted any more"
                    group.lost_reducer(spares[address], why)
            for address in now.keys() - set.intersection(*map(set, there)):
                if due(address) and answers(address):
                    for group in coordinator.groups:
                        group.offered(address, now[address])

    thread = threading.Thread(target=look, name="spare hosts", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
