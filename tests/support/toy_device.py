"""The device `toy` (toy_device.cpp), for tests. As a plugin of pytest, this module builds the device
and adds it to torch: `make test-device`. Such a device cannot be removed, so these tests run in a
process of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE, ROOT = Path(__file__).with_suffix(".cpp"), Path(__file__).parents[2]
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("clang++")


def absent() -> str:
    """The reason why this process has no device `toy`, or ""."""
    if hasattr(torch, "toy"):
        return ""
    return "run by `make test-device`" if COMPILER else "no C++ compiler: apt install g++"


def built() -> Path:
    """Compile the device, unless this was done before, and return the library."""
    assert COMPILER is not None
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = ROOT / "build" / f"toy_device-{version}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        link = [f"-L{path}" for path in cpp_extension.library_paths()]
        unfinished = library.with_suffix(f".{os.getpid()}")
        words = [COMPILER, *FLAGS, *include, str(SOURCE), "-o", str(unfinished), *link]
        subprocess.run([*words, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
        unfinished.rename(library)
    return library


def seed(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    torch.ops.toy.set_rng_state(generator.get_state())


def load() -> None:
    """Add the device to torch, unless it is there."""
    if hasattr(torch, "toy"):
        return
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend("toy")
    module = ModuleType("torch.toy")
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_rng_state=lambda device: torch.ops.toy.get_rng_state(),
        set_rng_state=lambda state, device: torch.ops.toy.set_rng_state(state),
        manual_seed_all=seed,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module("toy", module)


def pytest_configure() -> None:
    if COMPILER:
        load()
