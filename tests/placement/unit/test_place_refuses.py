"""Options that place() refuses before it changes anything, as they would silently mean something
else (Rule 6)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roadtrain
import roadtrain_rdma as rdma
from roadtrain import Servers
from roadtrain.errors import ConfigError


def test_a_relay_does_not_turn_rdma_into_tcp() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    words = r"over TCP, but the option `link` is roadtrain_rdma\.RdmaOptions"
    with pytest.raises(ConfigError, match=words):
        roadtrain.place(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            store=Servers(["127.0.0.1:1"], relay="1MiB", link=rdma.RdmaOptions(device="mlx5_0")),
        )
    assert not model[0].weight.isnan().any()
