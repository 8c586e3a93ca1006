"""Benchmarks that measure roadtrain beside its peers. Peer libraries are imported only in this
package.

    python -m benchmarks NAME [--json FILE] [--quick]

Benchmarks start children as `python -m benchmarks.NAME`. PYTHONPATH is set below so that a child
finds this package from any working directory.
"""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _ROOT not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, _PATHS)])
