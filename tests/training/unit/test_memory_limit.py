"""A memory limit that the system enforces. Each test sets it in its own process, so that no
allocation of another test is refused."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from roadtrain.config.job import make_job
from roadtrain.errors import ConfigError, UnitError
from roadtrain.training.memory_limit import held, limited, peak, was_refused

BEGIN = """
import mmap, resource
from roadtrain.errors import BudgetError, ConfigError
from roadtrain.training.memory_limit import held, limited
MIB = 1 << 20
def take(nbytes):
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""
SMALL = {"model": {"config": {"model_type": "llama"}}}


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_allocation_beyond_the_limit_is_refused() -> None:
    output = output_of("""
before = resource.getrlimit(resource.RLIMIT_DATA)
limit = held() + 64 * MIB
try:
    with limited(limit, "take less"):
        kept = take(32 * MIB)
        take(64 * MIB)
except BudgetError as error:
    print(error)
take(128 * MIB)  # the limit ends with the context
assert resource.getrlimit(resource.RLIMIT_DATA) == before
""")
    assert "needed more" in output and "enforced by Linux (RLIMIT_DATA)" in output
    assert "hint: take less, or raise run.memory_limit" in output


def test_an_error_of_another_kind_is_left_alone() -> None:
    output = output_of("""
try:
    with limited(held() + 64 * MIB):
        raise OSError(28, "full")
except OSError as error:
    print(error.errno)
""")
    assert output == "28\n"


def test_a_limit_below_current_use_is_refused_with_both_numbers() -> None:
    message = r"run.memory_limit is 1.0 MiB, but the process holds [0-9.]+ [MG]iB"
    with pytest.raises(ConfigError, match=message), limited(1 << 20):
        pass


def test_a_limit_above_that_of_the_process_is_refused_with_both_numbers() -> None:
    output = output_of("""
most = held() + 64 * MIB
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
try:
    with limited(1 << 40):
        pass
except ConfigError as error:
    print(error)
""")
    assert "run.memory_limit is 1.0 TiB, but this process is limited to" in output


def test_a_system_that_does_not_enforce_it_is_refused() -> None:
    output = output_of("""
resource.setrlimit = lambda *_: None
try:
    with limited(held() + 64 * MIB):
        pass
except ConfigError as error:
    print(error)
""")
    assert "this system does not enforce RLIMIT_DATA" in output


def test_without_a_limit_nothing_is_set() -> None:
    with limited(None):
        assert held() > 0 and peak() > 0


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError(errno.ENOSPC, "no"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("a shape does not match"), False),
    ],
)
def test_which_errors_count_as_a_refused_allocation(error: Exception, refused: bool) -> None:
    outer = ValueError("while stepping")
    outer.__cause__ = error
    assert was_refused(error) == was_refused(outer) == refused


def test_the_key_of_a_job() -> None:
    assert make_job(SMALL).limit_nbytes is None
    assert make_job({**SMALL, "run": {"memory_limit": "1.5GiB"}}).limit_nbytes == 3 << 29
    with pytest.raises(UnitError, match="'much' is not a size"):
        make_job({**SMALL, "run": {"memory_limit": "much"}})
