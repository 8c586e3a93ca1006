"""`roadtrain probe`: measure this host and write a cluster.toml, in under a minute.

These values are measured: memory bandwidth; the speed of AdamW updates and of gradient sums on all
CPUs; in each storage directory, the rates of reads, of writes, and of simultaneous reads and
writes; the rates of matrix products and copies on the first device. A machine without devices
computes on its CPUs, as device `cpu`.

These values are read from the system: the size of memory, network cards with their nominal rates,
and the topology of devices, cards and disks, which is written as comments.

The command lists the values that it could not measure. With --hosts, the listening hosts and the
links between all hosts, in both directions, are measured too (probe_links.py). A host that is lost
during the measurement is listed as lost.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from roadtrain.chunks import MAX_CHUNK
from roadtrain.config.cluster import guesses, make_cluster
from roadtrain.device.buffers import Buffer, array_in
from roadtrain.errors import ConfigError, PeerError
from roadtrain.kernels.cast import cast
from roadtrain.kernels.sum import sum_k
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.planner import probe_links as links
from roadtrain.retry import slow_work
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.storage.rates import storage_rates
from roadtrain.sums.host_topology import cards, topology
from roadtrain.transport.address import address_of, own_address, tls_of, token_of
from roadtrain.transport.tcp import TcpOptions
from roadtrain.units import MIB, show_flops, show_rate

ELEMENTS, REPEATS = 32 * MIB, 5  # number of elements of an array, and of timed repetitions
BUFFERS, PART = 4, 1 << 19  # number of gradients to sum, and of elements per task
COPIED = 256 * MIB  # bytes of a copy
# Rows of the square matrices to multiply. A size after a product that took over 0.1 s is left out.
SIZES = (1024, 2048, 4096, 8192)


def _seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median seconds of `repeats` calls of `work`, after a call that is not timed."""
    work()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return median(took)


def _fp32(n: int) -> np.ndarray:
    return array_in(Buffer(n * 4).view, "fp32", 0, n)


def processors(threads: int) -> dict[str, float]:
    """Measure the CPUs with this number of threads. Return three rates in bytes/s.

    `memory_rate`: a copy in memory, counting both reads and writes. `updates`: AdamW with a bf16
    gradient and a bf16 copy of the parameter, counting 28 bytes per parameter. `sums`: summing 4
    gradients in bf16, counting the bytes of all 4 gradients.
    """
    source, target = _fp32(ELEMENTS), _fp32(ELEMENTS)
    source[:] = 1e-3
    grad = np.zeros(ELEMENTS, np.uint16)
    cast(source, "fp32", grad, "bf16")
    (rule,) = rules_for(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3))
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    hyper = rule.hyper(group | {"maximize": False, "amsgrad": False})
    first, second, copy = _fp32(ELEMENTS), _fp32(ELEMENTS), np.zeros(ELEMENTS, np.uint16)
    rows = np.zeros((-(-ELEMENTS // MAX_CHUNK), len(rule.scalars)))
    arriving = [grad, *(grad.copy() for _ in range(BUFFERS - 1))]

    def move(at: int) -> None:
        np.copyto(target[at : at + PART], source[at : at + PART])

    def update(at: int) -> None:
        part, row = slice(at, at + MAX_CHUNK), rows[at // MAX_CHUNK]
        state, out = [first[part], second[part]], copy[part]
        rule.apply(target[part], grad[part], "bf16", state, row, hyper, 1.0, out, "bf16")

    def add(at: int) -> None:
        sum_k(target[at : at + PART], [a[at : at + PART] for a in arriving], "bf16")

    with ThreadPoolExecutor(threads) as pool:

        def all_of(work: Callable[[int], None], size: int) -> Callable[[], None]:
            return lambda: list(pool.map(work, range(0, ELEMENTS, size))).clear()

        return {
            "memory_rate": 8 * ELEMENTS / _seconds(all_of(move, PART)),
            "updates": 28 * ELEMENTS / _seconds(all_of(update, MAX_CHUNK)),
            "sums": 2 * BUFFERS * ELEMENTS / _seconds(all_of(add, PART)),
        }


def products(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = SIZES
) -> dict[int, float]:
    """Measure products of two square matrices. Return a mapping from the number of rows of a matrix
    to the FLOP/s of the product. Sizes that would take too long are missing."""
    out: dict[int, float] = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

        def product(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mm(a, b)
            _settle(device)

        seconds = _seconds(product, 3)
        out[size] = 2.0 * size**3 / seconds
        if seconds > 0.1:
            break
    return out


def _settle(*devices: torch.device) -> None:
    """Wait until the devices have finished their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the measured rate of copies from `source` to `target` in bytes/s."""

    def run() -> None:
        target.copy_(source, non_blocking=True)
        _settle(source.device, target.device)

    return source.nbytes / _seconds(run)


def copies(device: torch.device, nbytes: int = COPIED) -> tuple[float, float]:
    """Return two rates of a device in bytes/s: copies between pinned host memory and the device, in
    the slower direction, and the device's memory bandwidth, counting both reads and writes."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return min(_copy(host, there), _copy(there, host)), 2 * _copy(there, torch.empty_like(there))


def fabric(devices: Sequence[torch.device], nbytes: int = COPIED) -> float:
    """Return the rate in bytes/s of the slowest copy from the first device to any other device. The
    slowest copy counts, because collectives wait for it."""
    source, *targets = (torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices)
    return min(_copy(source, target) for target in targets)


def accelerators() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


def device_name(device: torch.device) -> str:
    """Return the name of a device, which is the kind of device if torch does not know a name."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)
    return str(name_of(device.index))


def describe(dirs: Sequence[str], threads: int) -> links.ProbeReport:
    """Measure this host, and return a report. `dirs`: the storage directories to measure.
    `threads`: the number of threads for measurements of the CPUs."""
    name, missing = socket.gethostname().split(".")[0] or "host", list[str]()
    ssds, uplink = _ssds(dirs, missing)
    rates, whole = processors(threads), psutil.virtual_memory().total
    host: dict[str, Any] = {"name": name, "memory": f"{whole}B"}
    host |= {what: f"{rate:.0f}B/s" for what, rate in rates.items()}
    measured = [f"hosts.{name}.{what}" for what in rates]
    devices = accelerators()
    count = max(1, len(devices))
    if devices:
        device, dtype = devices[0], torch.bfloat16
        copy, memory_rate = copies(device)
        kind = device_name(device)
        _, memory = torch.accelerator.get_memory_info(device)
    else:
        device, dtype, kind = torch.device("cpu"), torch.float32, "cpu"
        copy, memory_rate, memory = rates["memory_rate"], rates["memory_rate"], whole
        missing.append("accelerators: there are none, so the CPUs compute (fp32)")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by_size = products(device, dtype)
    finally:
        torch.set_num_threads(before)
    host |= {
        "devices": count,
        "device": {
            "kind": kind,
            "flops": f"{max(by_size.values()) / 1e12:.6f}TFLOP/s",
            "memory": f"{memory}B",
            "memory_rate": f"{memory_rate:.0f}B/s",
            "copy": f"{copy:.0f}B/s",
        },
    }
    measured.append(f"hosts.{name}.device")
    if count > 1:
        host["fabric"] = f"{fabric(devices):.0f}B/s"
        measured.append(f"hosts.{name}.fabric")
        missing += [
            f"device {other.index}, a {device_name(other)}: assumed to be like device 0, a {kind}"
            for other in devices[1:]
            if device_name(other) != kind
        ]
    if ssds:
        host |= {"ssds": ssds, "uplink": f"{uplink:.0f}B/s"}
        measured += [f"hosts.{name}.ssds", f"hosts.{name}.uplink"]
    found, unknown = cards()
    if found:
        host["nics"] = found
    print(
        f"memory {show_rate(rates['memory_rate'])}, updates {show_rate(rates['updates'])}, sums "
        f"{show_rate(rates['sums'])}; {count} x {kind}: "
        + ", ".join(f"{size} {show_flops(flops)}" for size, flops in by_size.items()),
        flush=True,
    )
    places, gaps = topology(dirs)
    tree = {"name": name, "hosts": [host], "measured": measured}
    return links.ProbeReport(tree, [*missing, *unknown, *gaps], places)


def _ssds(dirs: Sequence[str], missing: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Return the `ssds` entries of these directories for the cluster file, and the total rate of
    the SSDs in bytes/s. Add the names of values that could not be measured to `missing`."""
    ssds, uplink = [], 0.0
    if not dirs:
        missing.append("storage: name the directories of your SSDs with --dirs")
    for directory in dirs:
        storage = storage_rates(directory)
        mixed = min(2.0, max(1.0, storage.mixed / (2 / (1 / storage.read + 1 / storage.write))))
        ssds.append(
            {
                "read": f"{storage.read:.0f}B/s",
                "write": f"{storage.write:.0f}B/s",
                "mixed": round(mixed, 3),
                "capacity": f"{psutil.disk_usage(directory).total}B",
                "directories": [os.path.abspath(directory)],
            }
        )
        uplink += max(storage.read, storage.mixed)
        if storage.note:
            missing.append(f"direct I/O in {directory}: {storage.note}")
        print(
            f"{directory}: read {show_rate(storage.read)}, write {show_rate(storage.write)}, both "
            f"{show_rate(storage.mixed)}",
            flush=True,
        )
    return ssds, uplink


def with_others(own: links.ProbeReport, hosts: Sequence[str], options: TcpOptions) -> bool:
    """Add the reports of the listening `hosts` and the measured links to `own`. Return False if a
    host or a link could not be measured."""
    trees, lost = {"here": own.tree["hosts"][0]}, list[str]()
    own.topology = [f"{trees['here']['name']}: {line}" for line in own.topology]
    for host in hosts:
        try:
            report = links.ask(host, links.DESCRIBE, "", options)
            # validate the report before its use, since it comes from another host
            before = make_cluster(report.tree, "its report").hosts[0].name
        except (PeerError, ConfigError) as error:
            lost.append(f"host {host}: {error}")
            continue
        trees[host] = report.tree["hosts"][0]
        trees[host]["addresses"] = [address_of(host)[0]]
        trees["here"].setdefault("addresses", [own_address(address_of(host))])
        while trees[host]["name"] in {h["name"] for h in own.tree["hosts"]}:
            trees[host]["name"] += "+"
        name = trees[host]["name"]
        own.tree["hosts"].append(trees[host])
        own.tree["measured"] += [
            what.replace(f"hosts.{before}.", f"hosts.{name}.", 1)
            for what in report.tree.get("measured", ())
        ]
        own.missing += [f"{name}: {what}" for what in report.missing]
        own.topology += [f"{name}: {line}" for line in report.topology]
    found, broken = links.matrix([host for host in hosts if host in trees], options)
    print(links.format_matrix(found))
    for place, tree in trees.items():
        if mine := [both for pair, both in found.items() if place in pair]:
            rate, latency = max(rate for rate, _ in mine), min(latency for _, latency in mine)
            card = {"rate": f"{rate:.0f}B/s", "latency": f"{1e9 * latency:.0f}ns"}
            tree["nics"] = [{"kind": "ethernet", **card}]
            own.tree["measured"].append(f"hosts.{tree['name']}.nics")
    own.missing += lost + broken
    return not lost + broken


def comment(words: str) -> str:
    """Return the text without control characters and line breaks, for a comment of a TOML file."""
    return " ".join("".join(c if c.isprintable() else " " for c in words).split())


def command(
    *,
    dirs: str = "",
    out: str = "cluster.toml",
    listen: str = "",
    hosts: str = "",
    token_file: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    ca: str | None = None,
) -> int:
    """Measure this host (memory, updates, sums, storage, devices) and write a cluster.toml. List
    what was not measured.

    The exit code is 1 if another host or a link to another host could not be measured. Raises
    ConfigError; StoreError if a directory cannot be written; and PeerError if one of the hosts does
    not listen at the start.

    Args:
        dirs: storage directories to measure, separated by commas
        out: the file to write (cluster.toml)
        listen: HOST:PORT at which to answer probes of other hosts until Ctrl-C, instead of
            measuring
        hosts: HOST:PORT,... of listening hosts: measure them and all links between hosts too
        token_file: file (mode 600) with the token that listeners beyond this machine require
        cert: TLS: PEM file of this host's certificate
        key: TLS: PEM file of the certificate's private key
        ca: TLS: PEM file of the authority that signed the other hosts' certificates
    """
    begin = time.perf_counter()
    options = TcpOptions(token=token_of(token_file), tls=tls_of(cert, key, ca))
    directories, others = (
        [*dict.fromkeys(filter(None, words.split(",")))] for words in (dirs, hosts)
    )
    check_file(Path(out))
    if absent := next((path for path in directories if not Path(path).is_dir()), None):
        raise ConfigError(f"{absent} is not a directory", hint="name directories in --dirs")
    own = partial(describe, directories, len(os.sched_getaffinity(0)))
    if listen:
        if others:
            raise ConfigError("--listen and --hosts are both given", hint="give only one of them")
        links.serve(listen, options, own)
        return 0
    for other in others:
        links.reach(other, options)
    with slow_work("measuring this machine"):
        found = own()
    complete = not others or with_others(found, others, options)
    cluster = make_cluster(found.tree)
    missing = (f"not measured: {what}" for what in found.missing)
    notes = [comment(words) for words in (*found.topology, *missing)]
    lines = (f"roadtrain probe, {date.today().isoformat()}", *notes)
    head = "".join(f"# {line}\n" for line in lines)
    replace_file(Path(out), (head + cluster.to_toml()).encode(), "writing")
    print(*notes, sep="\n")
    guessed = ", ".join(f"{name} {text}" for name, (_, text) in guesses(cluster).items())
    print(f"wrote {out} in {time.perf_counter() - begin:.0f} s; assumed: {guessed or 'nothing'}")
    return 0 if complete else 1
