"""Checks of Python, packages, torch and the devices that torch sees."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator

from roadtrain.doctor.diagnosis import Diagnosis, Subject
from roadtrain.sums.host_topology import ACCELERATORS, NVIDIA, functions
from roadtrain.units import show_bytes

OLDEST, NEWEST = (3, 11), (3, 14)  # supported versions of Python
NEEDED = re.compile(r"([\w.-]+)>=([\d.]+)$")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 13, 0) of `2.13.0+cpu`."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def installed(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_versions(subject: Subject) -> Iterator[Diagnosis]:
    if not OLDEST <= subject.python <= NEWEST:
        have, least, most = (".".join(map(str, v)) for v in (subject.python, OLDEST, NEWEST))
        what = f"Python {have} is not supported, {least} to {most} are"
        yield Diagnosis("python", "wrong", what, f"create the environment with Python {most}")
    for requirement in _requirements():
        if found := NEEDED.match(requirement):
            name, least = found.groups()
            have = installed(name)
            if not have or numbers(have) < numbers(least):
                what = f"{name} is {have or 'missing'}, but roadtrain needs {least} or later"
                yield Diagnosis("version", "wrong", what, f"pip install '{requirement}'")


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("roadtrain") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        return ["torch>=2.7"]


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_extras(subject: Subject) -> Iterator[Diagnosis]:
    """Report optional packages that the job or its launcher needs and that are missing."""
    needs = {}
    if subject.job:
        needs["transformers"] = "[model] builds a model of transformers", "hf"
        if subject.job.data.tokenizer != "bytes":
            needs["tokenizers"] = f"data.tokenizer is {subject.job.data.tokenizer}", "hf"
    if subject.environ.get("RAY_ADDRESS"):
        needs["ray"] = "RAY_ADDRESS is set", "ray"
    for module, (why, extra) in needs.items():
        if not is_there(module):
            what = f"{module} is not installed, but {why}"
            yield Diagnosis("extra", "wrong", what, f"pip install 'roadtrain[{extra}]'")
    module = subject.job.optimizer.name.partition(":")[0] if subject.job else ""
    if subject.job and ":" in subject.job.optimizer.name and not is_there(module):
        what = f"optimizer.name is {subject.job.optimizer.name}, but {module} cannot be imported"
        yield Diagnosis("extra", "wrong", what, "install its package, or set PYTHONPATH")


def nvidia_devices(subject: Subject) -> int:
    """Return the number of NVIDIA devices of this host, whether or not torch sees them."""
    files = list((subject.root / "dev").glob("nvidia[0-9]*"))
    return max(len(files), len(functions(ACCELERATORS, NVIDIA, subject.root / "sys")))


def check_torch(subject: Subject) -> Iterator[Diagnosis]:
    torch, cards = subject.torch, nvidia_devices(subject)
    if torch.unknown:
        what, fix = f"torch: {torch.unknown}", "repeat the command when the machine is less busy"
        yield Diagnosis("torch", "note", what, fix)
    elif torch.failure:
        fix = "reinstall torch; `python -c 'import torch'` shows the whole error"
        yield Diagnosis("torch", "wrong", f"torch: {torch.failure}", fix)
    elif cards and not torch.devices:
        yield _unseen(subject, cards)
    if (subject.root / "dev/kfd").exists() and not (
        torch.built_for or torch.unknown or torch.failure
    ):
        what = f"this host has an AMD device (/dev/kfd), but torch {torch.version} is for CPUs"
        yield Diagnosis("torch-build", "note", what, "install torch built for ROCm to use it")


def _unseen(subject: Subject, cards: int) -> Diagnosis:
    """Return the reason why torch sees none of the host's NVIDIA devices."""
    torch = subject.torch
    hidden = [name for name in HIDING if subject.environ.get(name) in ("", "-1")]
    there = f"this host has {cards} NVIDIA device(s)"
    if not torch.built_for.startswith("CUDA"):
        what = f"{there}, but torch {torch.version} is built for {torch.built_for or 'CPUs'}"
        fix = "pip install --force-reinstall torch, from the index that pytorch.org names for CUDA"
        return Diagnosis("torch-build", "wrong", what, fix)
    if not (subject.root / "proc/driver/nvidia/version").exists():
        what = f"{there} and torch is built for {torch.built_for}, but no driver is loaded"
        fix = "install NVIDIA's driver (`nvidia-smi` must work), or `docker run --gpus all`"
        return Diagnosis("driver", "wrong", what, fix)
    if hidden:
        what = f"{there}, but {hidden[0]}={subject.environ[hidden[0]]!r} hides them"
        return Diagnosis("hidden-devices", "wrong", what, f"unset {hidden[0]}")
    what = f"{there}, but torch sees none: the driver may be too old for {torch.built_for}"
    return Diagnosis("driver", "wrong", what, "update the driver, and check /dev/nvidia* (mode)")


def check_devices(subject: Subject) -> Iterator[Diagnosis]:
    devices = subject.torch.devices
    if len(kinds := sorted({name for name, _, _ in devices})) > 1:
        yield Diagnosis(
            "mixed-devices",
            "slow",
            f"the devices are of {len(kinds)} kinds ({', '.join(kinds)}): all wait for the slowest",
            "choose equal devices with CUDA_VISIBLE_DEVICES",
        )
    for number, (name, free, total) in enumerate(devices):
        if free < total // 2:
            what = f"device {number} ({name}) has {show_bytes(free)} of {show_bytes(total)} free"
            yield Diagnosis("device-in-use", "slow", what, "end the other programs on the device")
