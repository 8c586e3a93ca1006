"""Skip tests that cannot run on this machine. The first line of a reason names what to install;
tests with the same first line are counted together (not_run.py)."""

from __future__ import annotations

import shutil
from typing import Never

import pytest

# What a machine may lack for XDP. Any other reason is a defect of the program.
NO_XDP = {
    "libbpf.so.1 is not installed": "no libbpf.so.1: apt install libbpf1",
    "Operation not permitted": "the kernel allows no BPF program here",
    "Function not implemented": "the kernel has no BPF",
}


def missing(*programs: str) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]


def needs(*programs: str, apt: str) -> pytest.MarkDecorator:
    """Skip a test if a program is missing. apt: Debian packages with the programs, which `.ci/run`
    installs."""
    absent = ", ".join(missing(*programs))
    return pytest.mark.skipif(bool(absent), reason=f"no {absent}: apt install {apt}")


def no_xdp(why: str) -> Never:
    """Skip a test if this machine has no XDP; fail it if the program is refused."""
    for part, reason in NO_XDP.items():
        if part in why:
            pytest.skip(f"{reason}\n{why}")
    pytest.fail(why)
