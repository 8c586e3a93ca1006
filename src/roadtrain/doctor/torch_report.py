"""`python -m roadtrain.doctor.torch_report`: import torch, and print a TorchReport as JSON.

A process of its own, because importing torch or starting a driver may take long, hang or crash.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import msgspec

from roadtrain.errors import ConfigError
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
    command = [sys.executable, "-m", "roadtrain.doctor.torch_report"]
    try:
        done = subprocess.run(
            command, capture_output=True, env=environ, timeout=timeout_s, check=False
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchReport)
    except subprocess.TimeoutExpired:
        return TorchReport(unknown=f"torch could not be imported within {timeout_s:.1f} s")
    except (IndexError, msgspec.DecodeError):
        error = done.stderr.decode(errors="replace").strip() or "no message"
        why = f"exit code {done.returncode}: {error.splitlines()[-1]}"
        return TorchReport(failure=f"importing it or its devices ended with {why}")


def main() -> None:
    torch: Any = importlib.import_module("torch")
    built = torch.version
    kinds = {"CUDA": built.cuda, "ROCm": built.hip, "XPU": getattr(built, "xpu", None)}
    built_for = next((f"{kind} {number}" for kind, number in kinds.items() if number), "")
    report = TorchReport(str(torch.__version__), built_for, threads=torch.get_num_threads())
    if torch.accelerator.is_available():
        report = with_devices(torch, report)
    print(msgspec.json.encode(report).decode(), flush=True)
    os._exit(0)  # torch takes a while to end


def with_devices(torch: Any, report: TorchReport) -> TorchReport:
    accelerator: Any = importlib.import_module("roadtrain.device.accelerator")
    kind = torch.accelerator.current_accelerator().type
    name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda _: kind)
    found, refusals = [], list[str]()
    for number in range(torch.accelerator.device_count()):
        device = accelerator.accelerator_of(torch.device(kind, number))
        try:
            memory = device.memory()
        except ConfigError:  # torch does not know it
            memory = 0, 0
        found.append((str(name_of(number)), *memory))
        if number == 0:
            device.report = refusals.append
            device.try_pin(torch.zeros(PINNED, dtype=torch.uint8))
    return msgspec.structs.replace(
        report, devices=tuple(found), kind=kind, unpinned=" ".join(refusals)
    )


if __name__ == "__main__":
    main()
