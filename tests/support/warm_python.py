"""A `python` for tests that start many processes: the processes are forked from one that has imported
torch, transformers and roadtrain, which saves the seconds that a fresh interpreter takes for it.

    test -- subprocess --> bin/python (warm_client.py) -- socket --> warm_server.py -- fork --> command

The client stands for the command: it passes signals on, ends with the command's status, and takes the
command with it when it is killed. Processes that the command starts with `sys.executable` are warm too.
Use the real interpreter in tests of a process's start, imports or limits.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def warm_folder() -> Path:
    """The folder of `python`, `roadtrain` and `torchrun`, for the PATH of a test's commands. The server
    ends with this process."""
    root = Path(tempfile.mkdtemp(prefix="roadtrain-warm-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "bin").mkdir()
    (root / "python").symlink_to(sys.executable)
    prefix = Path(sys.prefix)
    if (
        prefix / "pyvenv.cfg"
    ).exists():  # so that commands that are not forked find the same packages
        shutil.copy(prefix / "pyvenv.cfg", root)
        (root / "lib").symlink_to(prefix / "lib")
    source = (HERE / "warm_client.py").read_text()
    for name in ("python", "roadtrain", "torchrun"):
        (root / "bin" / name).write_text(f"#!{sys.executable} -IS\n{source}")
        (root / "bin" / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "warm_server.py"), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n", (
        "the server of warm Python processes has not started"
    )
    server.stdout.close()
    atexit.register(server.wait)
    atexit.register(server.stdin.close)  # runs first
    return root / "bin"


def warm_python() -> str:
    """The path of `python`."""
    return str(warm_folder() / "python")
