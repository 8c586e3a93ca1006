"""`import roadtrain.hvd as hvd`: the API of Horovod and BytePS (integrations/horovod.py)."""

import sys

from roadtrain.integrations import horovod
from roadtrain.integrations.horovod import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = horovod
