"""`python -m roadtrain.doctor.torch_report`: import torch, and print a TorchReport as JSON.

A process of its own, because importing torch or starting a driver may take long, hang or crash.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import msgspec

from roadtrain.units import MIB

PINNED = 256 * MIB  # bytes that are pinned as a trial


class TorchReport(msgspec.Struct, frozen=True):
    """A report on torch, from a process that imported it."""

    version: str = ""
    built_for: str = ""  # such as `CUDA 12.8`; "" if torch computes on CPUs only
    devices: tuple[tuple[str, int, int], ...] = ()  # name, free bytes and total bytes of each
    kind: str = ""  # `cuda`, `xpu`, ...; "" without a device
    threads: int = 0  # threads of an operation on the CPU
    unpinned: str = ""  # why memory could not be pinned for the first device
    failure: str = ""  # why torch could not be used
    unknown: str = ""  # why nothing is known about torch


def report_torch(environ: dict[str, str], timeout_s: float) -> TorchReport:
    """Return the report of a new process, which is killed after `timeout_s`."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return TorchReport(failure="torch is not installed")
    command = [sys.executable, "-m", "roadtrain.doctor.torch_report"]
    try:
        done = subprocess.run(
            command, capture_output=True, env=environ, timeout=timeout_s, check=False
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchReport)
    except subprocess.TimeoutExpired:
        unknown = f"not examined, since importing it and its devices took more than {timeout_s:g} s"
        return TorchReport(version, unknown=unknown)
    except (IndexError, msgspec.DecodeError):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        failure = f"importing it failed with exit code {done.returncode}: {lines[-1]}"
        return TorchReport(version, failure=failure)


def main() -> None:
    torch: Any = importlib.import_module("torch")
    built = torch.version
    kinds = {"CUDA": built.cuda, "ROCm": built.hip, "XPU": getattr(built, "xpu", None)}
    built_for = next((f"{kind} {number}" for kind, number in kinds.items() if number), "")
    report = TorchReport(str(torch.__version__), built_for, threads=torch.get_num_threads())
    if torch.accelerator.is_available():
        try:
            report = _with_devices(torch, report)
        except Exception as error:  # the driver's errors have many types
            failure = f"it sees a device, but cannot use it: {error}".splitlines()[0]
            report = msgspec.structs.replace(report, failure=failure)
    print(msgspec.json.encode(report).decode(), flush=True)
    os._exit(0)  # torch takes a while to end


def _with_devices(torch: Any, report: TorchReport) -> TorchReport:
    accelerator: Any = importlib.import_module("roadtrain.device.accelerator")
    kind = torch.accelerator.current_accelerator().type
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda _: kind)
    devices = [
        (str(name_of(number)), *torch.accelerator.get_memory_info(number))
        for number in range(torch.accelerator.device_count())
    ]
    first = accelerator.accelerator_of(torch.device(kind, 0))
    unpinned: list[str] = []
    first.report = unpinned.append
    memory = torch.zeros(PINNED, dtype=torch.uint8)
    if first.try_pin(memory):
        first.unpin(memory)
    return msgspec.structs.replace(
        report, devices=tuple(devices), kind=kind, unpinned=" ".join(unpinned)
    )


if __name__ == "__main__":
    main()
