"""`roadtrain probe`: what this host gives, measured, as a cluster.toml. Under a minute.

Measured: bandwidth of memory, the speed of an AdamW update and of sums over arriving gradients by all processors,
reads, writes and both at once of each storage directory, matrix products and copies of each device (a machine without
one computes on its processors, as device `cpu`). Read from the system: memory, network cards and their stated rates,
where devices and cards hang. What could not be measured is named, and assumed by whoever reads the file. Links to other
hosts are measured where these listen (probing_links.py).
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

from roadtrain import probing_links as links
from roadtrain.kernels.cast import cast
from roadtrain.kernels.rules import rules_for
from roadtrain.kernels.sum import sum_k
from roadtrain.node.dial import token_of
from roadtrain.probe import storage_rates
from roadtrain.spec.chunks import MAX_CHUNK
from roadtrain.spec.cluster import make_cluster
from roadtrain.store.buffers import Buffer, array_in
from roadtrain.store.direct import replace_file
from roadtrain.units import MIB, show_rate
from roadtrain.wire.tcp import Options

ELEMENTS, REPEATS = 32 * MIB, 5
BUFFERS, PART = 4, 1 << 19
SIZES = (1024, 2048, 4096, 8192)  # of square matrices, as far as they take less than a second


def _seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    work()
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return median(took)


def _fp32(n: int) -> np.ndarray:
    return array_in(Buffer(n * 4).view, "fp32", 0, n)


def processors(threads: int, elements: int = ELEMENTS) -> dict[str, float]:
    """Bytes a second: `memory_rate` of a copy, read and written; `updates` of AdamW, 28 a parameter (bf16 gradient in,
    bf16 copy out); `sums` of BUFFERS bf16 gradients, bytes that arrive."""
    source, target = _fp32(elements), _fp32(elements)
    source[:] = 1e-3
    grad = np.zeros(elements, np.uint16)
    cast(source, "fp32", grad, "bf16")
    (rule,) = rules_for(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3))
    hyper = rule.hyper({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False,
                        "amsgrad": False})
    first, second, copy = _fp32(elements), _fp32(elements), np.zeros(elements, np.uint16)
    rows = np.zeros((-(-elements // MAX_CHUNK), len(rule.scalars)))
    arriving = [grad, *(grad.copy() for _ in range(BUFFERS - 1))]

    def move(at: int) -> None:
        np.copyto(target[at : at + PART], source[at : at + PART])

    def update(at: int) -> None:
        part = slice(at, at + MAX_CHUNK)
        rule.apply(target[part], grad[part], "bf16", [first[part], second[part]], rows[at // MAX_CHUNK], hyper, 1.0,
                   copy[part], "bf16")

    def add(at: int) -> None:
        sum_k(target[at : at + PART], [a[at : at + PART] for a in arriving], "bf16")

    with ThreadPoolExecutor(threads) as pool:
        def all_of(work: Callable[[int], None], size: int) -> Callable[[], None]:
            return lambda: list(pool.map(work, range(0, elements, size))).clear()

        return {"memory_rate": 8 * elements / _seconds(all_of(move, PART)),
                "updates": 28 * elements / _seconds(all_of(update, MAX_CHUNK)),
                "sums": 2 * BUFFERS * elements / _seconds(all_of(add, PART))}


def products(device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """size -> FLOP/s of a product of two square matrices."""
    out: dict[int, float] = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

        def product(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mm(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        seconds = _seconds(product, 3)
        out[size] = 2.0 * size**3 / seconds
        if seconds > 0.1:
            break
    return out


def copies(device: torch.device, nbytes: int = 256 * MIB) -> tuple[float, float]:
    """Bytes a second to and from the device, pinned; and of its own memory, read and written."""
    host, there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.empty(nbytes, dtype=torch.uint8,
                                                                                      device=device)
    other = torch.empty_like(there)

    def wait(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            work()
            torch.cuda.synchronize(device)

        return run

    to, back = _seconds(wait(lambda: there.copy_(host, True))), _seconds(wait(lambda: host.copy_(there, True)))
    return nbytes / max(to, back), 2 * nbytes / _seconds(wait(lambda: other.copy_(there)))


def cards() -> tuple[list[dict[str, Any]], list[str]]:
    """Network cards that are up and say their rate, and what is not known of others."""
    found, missing = [], []
    for path in sorted(Path("/sys/class/net").glob("*")):
        if path.name == "lo" or not (path / "device").exists():
            continue
        try:
            mbit = int((path / "speed").read_text())
        except (OSError, ValueError):
            mbit = -1
        infiniband = (path / "type").read_text().strip() == "32"
        if mbit > 0:
            found.append({"kind": "infiniband" if infiniband else "ethernet", "rate": f"{mbit}Mbit/s"})
        else:
            missing.append(f"the rate of network card {path.name}")
    return found, missing


def describe(dirs: Sequence[str], threads: int) -> tuple[dict[str, Any], list[str]]:
    """A cluster.toml's tree of this host alone, and what could not be measured."""
    name, missing = socket.gethostname().split(".")[0] or "host", list[str]()
    rates = processors(threads)
    host: dict[str, Any] = {"name": name, "memory": f"{psutil.virtual_memory().total}B",
                            **{what: f"{rate:.0f}B/s" for what, rate in rates.items()}}
    measured = [f"hosts.{name}.{what}" for what in rates]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        device, dtype = torch.device("cuda", 0), torch.bfloat16
        copy, memory_rate = copies(device)
        kind, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    else:
        device, dtype, count, kind = torch.device("cpu"), torch.float32, 1, "cpu"
        copy, memory_rate, memory = rates["memory_rate"], rates["memory_rate"], psutil.virtual_memory().total
        missing.append("accelerators: there are none, so the processors compute (fp32)")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by_size = products(device, dtype)
    finally:
        torch.set_num_threads(before)
    host |= {"devices": count, "device": {
        "kind": kind, "flops": f"{max(by_size.values()) / 1e12:.6f}TFLOP/s", "memory": f"{memory}B",
        "memory_rate": f"{memory_rate:.0f}B/s", "copy": f"{copy:.0f}B/s"}}
    measured.append(f"hosts.{name}.device")
    if count > 1:
        missing.append("links between devices (fabric)")
    ssds, uplink = [], 0.0
    for directory in dirs:
        storage = storage_rates(directory)
        mixed = min(2.0, max(1.0, storage.mixed / (2 / (1 / storage.read + 1 / storage.write))))
        ssds.append({"read": f"{storage.read:.0f}B/s", "write": f"{storage.write:.0f}B/s", "mixed": round(mixed, 3),
                     "capacity": f"{psutil.disk_usage(directory).total}B"})
        uplink += max(storage.read, storage.mixed)
        if storage.note:
            missing.append(f"direct I/O in {directory}: {storage.note}")
        print(f"{directory}: read {show_rate(storage.read)}, write {show_rate(storage.write)}, both "
              f"{show_rate(storage.mixed)}", flush=True)
    if ssds:
        host |= {"ssds": ssds, "uplink": f"{uplink:.0f}B/s"}
        measured += [f"hosts.{name}.ssds", f"hosts.{name}.uplink"]
    found, unknown = cards()
    if found:
        host["nics"] = found
    print(f"memory {show_rate(rates['memory_rate'])}, updates {show_rate(rates['updates'])}, sums "
          f"{show_rate(rates['sums'])}; {count} x {kind}: " + ", ".join(
              f"{size} {flops / 1e12:.3g} TFLOP/s" for size, flops in by_size.items()), flush=True)
    return {"name": name, "hosts": [host], "measured": measured}, [*missing, *unknown]


def with_others(tree: dict[str, Any], hosts: Sequence[str], options: Options) -> list[str]:
    """Adds what the `hosts` that listen say of themselves, and measured links, to the tree; returns what they could not
    measure. Raises PeerError."""
    missing, names = [], ["here", *hosts]
    for host in hosts:
        other, lacking = links.ask(host, links.DESCRIBE, "", options)
        (own,) = other["hosts"]
        before = own["name"]
        while own["name"] in {one["name"] for one in tree["hosts"]}:
            own["name"] += "+"
        tree["hosts"].append(own)
        tree["measured"] += [name.replace(f"hosts.{before}.", f"hosts.{own['name']}.", 1) for name in other["measured"]]
        missing += [f"{own['name']}: {what}" for what in lacking]
    found = links.matrix(hosts, options)
    print(links.shown(found))
    for name, own in zip(names, tree["hosts"]):
        mine = [both for pair, both in found.items() if name in pair]
        own["nics"] = [{"kind": "ethernet", "rate": f"{max(rate for rate, _ in mine):.0f}B/s",
                        "latency": f"{1e9 * min(latency for _, latency in mine):.0f}ns"}]
        tree["measured"].append(f"hosts.{own['name']}.nics")
    return missing


def command(
    *, dirs: str = "", out: str = "cluster.toml", listen: str = "", hosts: str = "", token_file: str | None = None
) -> int:
    """Raises StoreError where a directory cannot be written, ConfigError, PeerError."""
    begin, options = time.perf_counter(), Options(token=token_of(token_file))
    own = partial(describe, [one for one in dirs.split(",") if one], len(os.sched_getaffinity(0)))
    if listen:
        links.serve(listen, options, own)
        return 0
    tree, missing = own()
    if hosts:
        missing += with_others(tree, [one for one in hosts.split(",") if one], options)
        missing = [what for what in missing if "network card" not in what]
    cluster = make_cluster(tree)
    text = f"# roadtrain probe, {date.today().isoformat()}\n"
    text += "".join(f"# not measured: {what}\n" for what in missing) + cluster.to_toml()
    replace_file(Path(out), text.encode(), "writing")
    for what in missing:
        print(f"not measured: {what}")
    print(f"wrote {out} in {time.perf_counter() - begin:.0f} s; assumed: {', '.join(cluster.assumed) or 'nothing'}")
    return 0
