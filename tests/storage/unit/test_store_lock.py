"""The lock of a directory belongs to its process, not to forked children."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from roadtrain.errors import StoreError
from roadtrain.storage import lock
from roadtrain.storage.lock import Locks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of threads at a fork
def test_a_forked_child_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.1)
    held = Locks([tmp_path])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # like a DataLoader worker, which may outlive a killed trainer
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        # a release in the child does not release our lock
        with pytest.raises(StoreError, match=r"in use by (this|another) process"):
            Locks([tmp_path])
        held.close()
        Locks([tmp_path]).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
