"""`import roadtrain.hvd as hvd`: Horovod's and BytePS's calls (integrations/horovod.py)."""

import sys

from roadtrain.integrations import horovod
from roadtrain.integrations.horovod import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = horovod
