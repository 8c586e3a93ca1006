"""Buffers of a model in stages are those of the snapshot, whatever stages there were."""

import pytest
import torch
from torch import nn

from roadtrain.api.stage_buffers import buffers_blob, restore_buffers
from roadtrain.errors import ForeignError


def model(names, width=3):
    out = nn.Module()
    out.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    out.register_buffer("scratch", torch.zeros(2), persistent=False)
    for name in names:
        setattr(out, name, nn.BatchNorm1d(width))
    return out


def test_each_block_gets_its_own_and_what_is_common_the_first_stages() -> None:
    first, second = model(["a"]), model(["b"])
    first.a.running_mean.fill_(1.5)
    second.b.running_var.fill_(2.5)
    first.steps.fill_(7)
    second.steps.fill_(9)
    blobs = buffers_blob(first, 0) | buffers_blob(second, 1) | {"job": b"another"}
    whole = model(["a", "b"])
    restore_buffers(blobs, whole)
    assert whole.a.running_mean.tolist() == [1.5] * 3
    assert whole.b.running_var.tolist() == [2.5] * 3
    assert int(whole.steps) == 7
    later = model(["b"])
    restore_buffers(blobs, later)
    assert later.b.running_var.tolist() == [2.5] * 3


def test_none_is_nothing_and_another_shape_is_refused() -> None:
    assert buffers_blob(nn.Linear(2, 2), 0) == {}
    with pytest.raises(ForeignError, match=r"'a.running_mean' is \(3,\) in the snapshot, \(4,\)"):
        restore_buffers(buffers_blob(model(["a"]), 0), model(["a"], width=4))
