import os
import threading

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread only spins


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No thread and no descriptor outlives a test."""
    threads, files = set(threading.enumerate()), _files()
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and not t.name.startswith(("pymp", "numba"))]
    assert not left, f"threads left: {left}"
    new = {n: f for n, f in _files().items() if n not in files and f.startswith("/") and "/dev/" not in f}
    assert not new, f"descriptors left: {new}"


def _files():
    out = {}
    for n in os.listdir("/proc/self/fd"):
        try:
            out[n] = os.readlink(f"/proc/self/fd/{n}")
        except FileNotFoundError:
            continue
    return out
