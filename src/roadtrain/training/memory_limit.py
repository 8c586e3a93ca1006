"""A hard limit of this process's memory that the operating system enforces (`run.memory_limit`).

RLIMIT_DATA counts all private writable memory: what torch, numpy, roadtrain's buffers and thread
stacks have mapped, touched or not. An allocation beyond it is refused, so that a process ends with
a sentence instead of being killed. It needs no privilege. Does NOT count the code of libraries, nor
memory shared with other processes; each process of a job has the limit for itself.
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
# torch's and LLVM's allocators raise no MemoryError
_REFUSED = ("can't allocate memory", "not enough memory", "can't start new thread")


@contextmanager
def limited(nbytes: int | None, way_out: str = "lower budget.host") -> Iterator[None]:
    """Inside the context the process gets at most `nbytes` of private writable memory (None: no
    limit). Raises ConfigError where the system would not enforce that; BudgetError, which names
    the limit and says `way_out`, where an allocation was refused.
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
            f"the process holds {show_bytes(held())} and asked for more, run.memory_limit is"
            f" {show_bytes(nbytes)}, enforced by {ENFORCED_BY}",
            hint=f"{way_out}, or raise run.memory_limit",
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def was_refused(error: BaseException) -> bool:
    """Whether `error`, or what caused it, says that the system gave no memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _REFUSED):
        return True
    return error.__cause__ is not None and was_refused(error.__cause__)


def held() -> int:
    """Bytes of private writable memory of this process, as RLIMIT_DATA counts them."""
    return _status("VmData")


def peak() -> int:
    """Bytes of memory that this process had at most, the code of libraries included."""
    if _PROC.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # its parent's too


def _set(nbytes: int, most: int) -> None:
    """`most`: the process's hard limit."""
    if most not in (resource.RLIM_INFINITY, -1) and most < nbytes:
        raise ConfigError(
            f"run.memory_limit is {show_bytes(nbytes)}, this process may have at most"
            f" {show_bytes(most)} (ulimit -d)",
            hint="lower run.memory_limit, or leave it out: the lower limit holds already",
        )
    if _PROC.exists() and held() >= nbytes:
        raise ConfigError(
            f"run.memory_limit is {show_bytes(nbytes)}, the process holds {show_bytes(held())}"
            " before it begins",
            hint="raise run.memory_limit",
        )
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, most))


def _check_enforced(nbytes: int) -> None:
    """Asks for all of it. A system that gives that does not count this memory."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return
    raise ConfigError(
        f"run.memory_limit: this system does not enforce RLIMIT_DATA, it gave {show_bytes(nbytes)}"
        " beyond the limit",
        hint="leave run.memory_limit out; Linux enforces it from version 4.7 on",
    )


def _status(name: str) -> int:
    lines = _PROC.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
