"""`python -m roadtrain.doctor.torch_report`: import torch, and print a TorchReport as JSON.

A process of its own, because importing torch or starting a driver may take long, hang or crash.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import msgspec

from roadtrain.doctor.diagnosis import TorchReport
from roadtrain.units import MIB

PINNED = 256 * MIB  # bytes that are pinned as a trial


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
        failure = f"importing torch and starting its devices took more than {timeout_s:.0f} s"
    except (IndexError, msgspec.DecodeError):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        failure = f"importing torch failed with exit code {done.returncode}: {lines[-1]}"
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
            failure = f"torch sees a device, but cannot use it: {error}".splitlines()[0]
            report = msgspec.structs.replace(report, failure=failure)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


def _with_devices(torch: Any, report: TorchReport) -> TorchReport:
    choice: Any = importlib.import_module("roadtrain.planner.probe")
    accelerator: Any = importlib.import_module("roadtrain.device.accelerator")
    devices = choice.accelerators()
    found = []
    for device in devices:
        free, total = torch.accelerator.get_memory_info(device)
        found.append((choice.device_name(device), free, total))
    first = accelerator.accelerator_of(devices[0])
    unpinned: list[str] = []
    first.report = unpinned.append
    memory = torch.zeros(PINNED, dtype=torch.uint8)
    if first.try_pin(memory):
        first.unpin(memory)
    return msgspec.structs.replace(
        report, devices=tuple(found), kind=devices[0].type, unpinned=" ".join(unpinned)
    )


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
