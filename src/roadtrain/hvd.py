"""`import roadtrain.hvd as hvd` provides the API of Horovod and BytePS, which is implemented in
integrations/horovod.py."""

import sys

from roadtrain.integrations import horovod
from roadtrain.integrations.horovod import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = horovod
