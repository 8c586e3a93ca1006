"""The lab of `summation`: worker hosts and spare hosts, each with one link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common.children import Server, serving
from roadtrain.lab import LabHost, LabNic, Network
from roadtrain.transport.address import write_token

PORT = 7300
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # environment of a worker: all hosts share the processors
TOKEN = b"only for this measurement"


def lab(workers: Sequence[float], spares: Sequence[float]) -> Network:
    """Build the network. `workers`, `spares`: bytes/s of the link of each host."""
    hosts = {f"w{i}": [LabNic(rate)] for i, rate in enumerate(workers)}
    hosts |= {f"s{i}": [LabNic(rate)] for i, rate in enumerate(spares)}
    return Network(hosts)


def hosts_of(network: Network, kind: str, count: int) -> list[LabHost]:
    """Return the first worker hosts ("w") or spare hosts ("s")."""
    return [network.hosts[f"{kind}{i}"] for i in range(count)]


@contextmanager
def spare_hosts(network: Network, count: int, budget: str, home: Path) -> Iterator[list[Server]]:
    """Let the first `count` spare hosts sum during the `with` block. Their token is in the file
    `token` of the folder `home`.
    """
    write_token(home / "token", TOKEN)
    words = ("--sum", "--budget", budget, "--token-file", str(home / "token"))
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(home, *words, name=host.name, port=PORT, host=host))
            for host in hosts_of(network, "s", count)
        ]
