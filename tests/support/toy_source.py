"""A block source in memory: keeps every block as bytes, checks the use of its buffers, and sums
gradients in push order."""

import numpy as np
import torch

from roadtrain.chunks import SEGMENT
from roadtrain.streaming.block_stream import BlockStream
from roadtrain.streaming.released import is_released
from roadtrain.streaming.split import DTYPES, split, table


class ToySource:
    def __init__(self, table, params):
        self.table = table
        self.params = params
        self.bytes = {b.index: np.zeros(max(b.pull_nbytes, 1), np.uint8) for b in table.blocks}
        self.version = dict.fromkeys(self.bytes, 0)
        self.out = {}  # block -> fetched buffers, latest last
        self.grads = {}  # param -> sum, in the parameter's dtype as torch sums
        self.pushes = []
        self.fetches = []
        for index, _, view in self.views(None):
            if not params[index].is_meta:
                view.copy_(params[index].detach())

    def views(self, block):
        for b in self.table.blocks:
            if block in (None, b.index):
                buffer = torch.from_numpy(self.bytes[b.index])
                for run in b.runs:
                    dtype = DTYPES[run.dtype]
                    flat = buffer[run.offset : run.offset + run.numel * dtype.itemsize].view(dtype)
                    for span in run.spans:
                        yield (
                            span.param,
                            run,
                            flat[span.start : span.stop].view(self.table.params[span.param].shape),
                        )

    def fetch(self, block):
        buffer = torch.from_numpy(self.bytes[block]).clone()  # aligned: MKL rounds by alignment
        self.out.setdefault(block, []).append(buffer)
        self.fetches.append(block)
        return buffer, self.version[block]

    def release(self, block):
        self.out[block].pop().fill_(255)  # NaN in every dtype, so that a late read shows

    def lay_out(self, block, write):
        flat = torch.full((self.table.blocks[block].push_nbytes,), 255, dtype=torch.uint8)
        write(flat)
        return flat

    def push(self, block, buffer, present):
        assert not self.out.get(block), "pushed before it was released"
        seen = 0
        for run in self.table.blocks[block].runs:
            if not run.trainable:
                continue
            dtype = DTYPES[run.dtype]
            flat = buffer[run.push_offset : run.push_offset + run.numel * dtype.itemsize].view(
                dtype
            )
            covered = torch.zeros(run.numel, dtype=torch.bool)
            for span in run.spans:
                if span.param in present:
                    seen += 1
                    covered[span.start : span.stop] = True
                    grad = flat[span.start : span.stop].view(self.table.params[span.param].shape)
                    if span.param in self.grads:
                        self.grads[span.param] = self.grads[span.param] + grad
                    else:
                        self.grads[span.param] = grad.clone()
            assert not flat[~covered].any(), "absent parameters and padding must be zero"
        assert seen == len(present) == len(set(present))
        self.pushes.append((block, tuple(present)))

    def sum_squares(self, param):
        return float(self.grads[param].double().square().sum())


class Streamed:
    """A model under a Stream with a ToySource."""

    def __init__(self, model, blocks=None, dtype=None, budget=1 << 30, scratch=None, groups=None):
        self.model = model
        self.split = split(model, blocks)
        parts = (self.split.root, *self.split.blocks)
        self.params = [p for part in parts for _, p in part.params]
        self.names = [n for part in parts for n, _ in part.params]
        groups = dict.fromkeys(self.params, 0) if groups is None else groups
        self.table = table(self.split, groups, dtype, SEGMENT)
        self.source = ToySource(self.table, self.params)
        self.ends = 0
        self.stream = BlockStream(
            self.split,
            self.table,
            self.source,
            "cpu",
            self.ended,
            activation_bytes=budget,
            scratch_dir=scratch,
        )
        self.activations = self.stream.activations
        self.root = torch.from_numpy(self.source.bytes[0])
        self.stream.attach(self.root)

    def ended(self):
        self.ends += 1

    def grad(self, name):
        index = self.names.index(name)
        return (
            self.params[index].grad
            if index < len(self.split.root.params)
            else self.source.grads.get(index)
        )

    def value(self, name):
        return next(v for i, _, v in self.source.views(None) if self.names[i] == name)

    def zero_grad(self):
        self.source.grads.clear()
        for p in self.params:
            p.grad = None

    def sgd(self, lr):
        """Run an SGD step on the stored values; every block gets a new version."""
        for index, _, view in self.source.views(None):
            grad = self.grad(self.names[index])
            if grad is not None:
                view.sub_(grad, alpha=lr)
        for block in self.source.version:
            self.source.version[block] += 1
        self.zero_grad()

    def finish(self):
        """Check that all buffers were returned, dropped and freed."""
        assert all(self.stream.pending(i + 1) == 0 for i in range(len(self.split.blocks)))
        assert not any(self.source.out.values())
        self.activations.check()
        assert self.activations.bytes_held == 0
        for part in self.split.blocks:
            for _, p in part.params:
                assert p.numel() == 0 or p.untyped_storage().nbytes() <= 8
                assert p.numel() == 0 or is_released(p)
        self.stream.detach()
        for part in self.split.blocks:
            assert "forward" not in part.module.__dict__
