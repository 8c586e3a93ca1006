"""put_file(): a file of a run, written on its host. `python -m roadtrain.launch.put_file`: a
HostFile as JSON in, `null` out, or exit code 1 and why it was not written. Does NOT import torch.
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
    """Writes it, so that a reader finds all of it or what was there; returns why not, or ""."""
    path = Path(file.path)
    before = os.umask(0o077) if file.secret else None
    try:
        make_directory(path.parent)
        # Hosts may share a directory, and put the same file there at the same time.
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
