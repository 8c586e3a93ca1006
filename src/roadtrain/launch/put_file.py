"""put_file(): write a file of a run on this host.

`python -m roadtrain.launch.put_file` reads a HostFile as JSON from stdin, writes the file, and
prints `null`. If the write fails, the command prints the reason and exits with code 1. Does NOT
import torch.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path

from roadtrain.errors import RoadtrainError
from roadtrain.launch.processes import HostFile
from roadtrain.storage.direct import make_directory, replace_file


def put_file(file: HostFile) -> str:
    """Write a file, or replace it atomically. Return "", or the reason why the write failed."""
    path = Path(file.path)
    before = os.umask(0o077) if file.secret else None
    try:
        make_directory(path.parent)
        # Hosts that share a directory may write the same file at the same time.
        own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        replace_file(own, file.content.encode(), "writing a file of the run")
        own.replace(path)
    except (RoadtrainError, OSError) as error:
        return str(error)
    finally:
        if before is not None:
            os.umask(before)
    return ""


if __name__ == "__main__":
    if refused := put_file(HostFile(**json.load(sys.stdin))):
        sys.exit(refused.replace("\nhint: ", "; "))
    print("null")
