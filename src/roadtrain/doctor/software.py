"""Checks of Python, packages, torch and the devices that torch sees."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress

from roadtrain.doctor.diagnosis import Diagnosis, Subject, diagnose
from roadtrain.sums.host_topology import ACCELERATORS, NVIDIA, functions
from roadtrain.training.tracker_libraries import LIBRARIES

OLDEST, NEWEST = (3, 11), (3, 14)  # supported versions of Python
NEEDED = re.compile(r"([\w.-]+)>=([\d.]+)$")
CONTAINER = (".dockerenv", "run/.containerenv", "run/secrets/kubernetes.io")
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
        yield diagnose("python", have=".".join(map(str, subject.python)))
    for text in importlib.metadata.requires("roadtrain") or ():
        if found := NEEDED.match(text):
            name, least = found.groups()
            have = installed(name)
            if numbers(have) < numbers(least):
                yield diagnose("version", name=name, have=have or "missing", least=least)


def check_extras(subject: Subject) -> Iterator[Diagnosis]:
    """Report optional packages that the job or its launcher needs and that are missing."""
    needs: list[tuple[str, str, str]] = []  # module, reason, extra that has it
    if job := subject.job:
        needs.append(("transformers", "[model] builds a model of transformers", "hf"))
        if job.data.tokenizer != "bytes":
            needs.append(("tokenizers", f"data.tokenizer is {job.data.tokenizer}", "hf"))
        if ":" in job.optimizer.name:
            needs.append((job.optimizer.name.partition(":")[0], "optimizer.name names it", ""))
        for name in job.run.report_to:
            why = f"run.report_to has {name}"
            needs += [(module, why, "trackers") for module in LIBRARIES[name][1]]
    if subject.environ.get("RAY_ADDRESS"):
        needs.append(("ray", "RAY_ADDRESS is set", "ray"))
    for module, why, extra in needs:
        there = None
        with suppress(ImportError, ValueError):
            there = importlib.util.find_spec(module)
        if there is None:
            hint = f"pip install 'roadtrain[{extra}]'"
            hint = hint if extra else "install its package, or set PYTHONPATH"
            yield diagnose("extra", module=module, why=why, hint=hint)


def check_torch(subject: Subject) -> Iterator[Diagnosis]:
    torch, root = subject.torch, subject.root
    cards = len(list((root / "dev").glob("nvidia[0-9]*")))
    # a container sees all PCI devices of its host, but may be meant to use none of them
    if not any((root / name).exists() for name in CONTAINER):
        cards = max(cards, len(functions(ACCELERATORS, NVIDIA, root / "sys")))
    built = torch.built_for or "CPUs"
    if torch.unknown:
        yield diagnose("torch/unknown", why=torch.unknown)
    elif torch.failure:
        yield diagnose("torch", why=torch.failure)
    elif (root / "dev/kfd").exists() and not torch.built_for:
        yield diagnose("torch-build", "note", count=1, maker="AMD", built=built)
    elif cards and not torch.devices:
        yield _unseen(subject, cards, built)


def _unseen(subject: Subject, cards: int, built: str) -> Diagnosis:
    """Return the reason why torch sees none of the host's NVIDIA devices."""
    hidden = next((name for name in HIDING if subject.environ.get(name) in ("", "-1")), "")
    if not built.startswith("CUDA"):
        return diagnose("torch-build", count=cards, maker="NVIDIA", built=built)
    if not (subject.root / "proc/driver/nvidia/version").exists():
        return diagnose("driver", count=cards, built=built, why="no driver is loaded")
    if hidden:
        value = subject.environ[hidden]
        return diagnose("hidden-devices", name=hidden, value=value, count=cards)
    return diagnose("driver", count=cards, built=built, why="the driver may be too old")


def check_devices(subject: Subject) -> Iterator[Diagnosis]:
    devices, kind = subject.torch.devices, subject.torch.kind
    device = subject.job.run.device if subject.job and not subject.torch.unknown else ""
    name, _, index = device.partition(":")
    if name not in ("", "cpu", kind) or (index.isdigit() and int(index) >= max(1, len(devices))):
        count, kind = len(devices), kind or "none"
        yield diagnose("missing-device", device=device, count=count, kind=kind)
    if len(kinds := sorted({name for name, _, _ in devices})) > 1:
        yield diagnose("mixed-devices", kinds=kinds)
    for number, (name, free, total) in enumerate(devices):
        if free < total // 2:
            yield diagnose("device-in-use", number=number, name=name, free=free, total=total)
