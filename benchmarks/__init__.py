"""Benchmarks that compare roadtrain with similar libraries ("peers", such as DeepSpeed). Only this
package imports peers.

    python -m benchmarks NAME [--json FILE] [--quick]

Each folder is a subject. Benchmarks start child processes as `python -m benchmarks.SUBJECT.NAME`.
Importing this package adds the checkout to PYTHONPATH, so that a child finds this package from any
working directory.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _PATHS)])
