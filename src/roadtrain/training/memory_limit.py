"""A hard limit of this process's memory, enforced by the operating system (`run.memory_limit`).

The limit counts all private writable memory, touched or not, but no code of libraries and no shared
memory. An allocation that would exceed the limit fails, so the process ends with an error message
instead of being killed.
"""

from __future__ import annotations

import errno
import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roadtrain.errors import BudgetError, ConfigError
from roadtrain.units import show_bytes

ENFORCED_BY = "Linux (RLIMIT_DATA)"
_PROC = Path("/proc/self/status")
# parts of messages that torch and LLVM raise instead of MemoryError when an allocation fails
_REFUSED = ("can't allocate memory", "not enough memory", "can't start new thread")


@contextmanager
def limited(nbytes: int | None, way_out: str = "lower budget.host") -> Iterator[None]:
    """Limit the private writable memory of this process to `nbytes` (None: no limit) while the body
    runs.

    Raises:
        ConfigError: The system does not enforce the limit, or the process already exceeds the
            limit.
        BudgetError: An allocation in the body failed. The hint to the user begins with `way_out`.
    """
    if nbytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    _set(nbytes, before[1])
    try:
        _check_enforced(nbytes)
        yield
    except Exception as error:
        if not was_refused(error):
            raise
        raise BudgetError(
            f"the process holds {show_bytes(held())} and needed more, but run.memory_limit is"
            f" {show_bytes(nbytes)}, enforced by {ENFORCED_BY}",
            hint=f"{way_out}, or raise run.memory_limit",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def was_refused(error: BaseException) -> bool:
    """Return whether `error`, or its cause, means that an allocation failed."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _REFUSED):
        return True
    return error.__cause__ is not None and was_refused(error.__cause__)


def held() -> int:
    """Return the bytes of private writable memory of this process, as RLIMIT_DATA counts them."""
    return _status("VmData")


def peak() -> int:
    """Return the peak resident memory of this process in bytes, including code of libraries."""
    if _PROC.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # may count the parent


def _set(nbytes: int, most: int) -> None:
    """Set the limit to `nbytes`, which must not exceed `most`, the hard limit of this process."""
    if most not in (resource.RLIM_INFINITY, -1) and most < nbytes:
        raise ConfigError(
            f"run.memory_limit is {show_bytes(nbytes)}, but this process is limited to"
            f" {show_bytes(most)} (ulimit -d)",
            hint="lower run.memory_limit, or leave it out, because `ulimit -d` is enforced anyway",
        )
    if _PROC.exists() and held() >= nbytes:
        raise ConfigError(
            f"run.memory_limit is {show_bytes(nbytes)}, but the process holds {show_bytes(held())}"
            " already before training",
            hint="raise run.memory_limit",
        )
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, most))


def _check_enforced(nbytes: int) -> None:
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return
    raise ConfigError(
        "run.memory_limit: this system does not enforce RLIMIT_DATA: an allocation of"
        f" {show_bytes(nbytes)} beyond the limit succeeded",
        hint="leave run.memory_limit out; Linux enforces RLIMIT_DATA since version 4.7",
    )


def _status(name: str) -> int:
    lines = _PROC.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
