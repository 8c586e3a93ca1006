"""Each peer beside us. Only here are peers imported.

    python -m benchmarks NAME [--json FILE] [--quick]

Benchmarks start children as `python -m benchmarks.NAME`; those find this folder whatever the
working directory is.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _PATHS)])
