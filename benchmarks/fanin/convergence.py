"""Check whether training converges if the network adds gradients as integers.

Trains the small job (examples/stdlib.toml) for 300 steps with two workers, whose gradients are
added in fp32 or as integers of 32, 16 and 8 bits. One process computes for all workers, and each
integer sum is bit for bit the sum of a switch. The loss on 64 held-out batches after the last step
is compared.

Training is chaotic: any change of rounding leads to different losses. A control run therefore adds
in fp32 and changes the last bit of each element of the first sum. The difference between its loss
and that of the fp32 run is pure chance. A smaller difference of an integer format says nothing
about this format, and a smaller goal is met or missed by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter

import numpy as np
import torch

import roadtrain
from benchmarks.common.report import Row, cores
from benchmarks.fanin.transfer import Bench
from roadtrain.chunks import Chunk
from roadtrain.config.job import Job, load_job
from roadtrain.streaming.split import DTYPES, split, table
from roadtrain.switch import fixed_point
from roadtrain.switch.options import WIDTH
from roadtrain.switch.packets import HEADER_NBYTES, PACKET_NBYTES
from roadtrain.training.build import build_model, build_optimizer, fitted
from roadtrain.training.data import Tokens
from roadtrain.training.placed_job import loss_of
from roadtrain.training.schedule import learning_rate

JOB = Path(roadtrain.__file__).parents[2] / "examples" / "stdlib.toml"
STEPS, TAIL, WORKERS = 300, 20, 2
SEQ_LEN, HELD_OUT = 128, 64
GOALS = {"int32": 0.001, "int16": 0.005, "int8": 0.02}

Sum = Callable[[Sequence[np.ndarray]], np.ndarray]


def in_fp32(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Add the gradients in fp32, worker after worker, as a server does."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def as_integers(width: int) -> Sum:
    """Return a function that adds gradients as integers of `width` bytes, as a switch does."""
    kind = fixed_point.INTEGER[width]

    def add(parts: Sequence[np.ndarray]) -> np.ndarray:
        elements, workers = parts[0].size, len(parts)
        count = fixed_point.packets_of(elements, width)
        found = np.zeros((workers, fixed_point.blocks_of(elements)), np.uint8)
        for part, into in zip(parts, found):
            fixed_point.exponents(part, "fp32", into)
        maxima = found.max(axis=0)
        total = np.zeros(count * PACKET_NBYTES, np.uint8)
        sums = total.reshape(count, PACKET_NBYTES)[:, HEADER_NBYTES:].view(kind)
        packets = np.zeros_like(total)
        payloads = packets.reshape(count, PACKET_NBYTES)[:, HEADER_NBYTES:].view(kind)
        for part in parts:
            fixed_point.quantize(part, "fp32", maxima, workers, width, 0, packets)
            sums += payloads
        out, complete = np.empty(elements, np.float32), np.ones(count, bool)
        numbers = np.arange(count)
        fixed_point.dequantize(total, complete, numbers, width, workers, maxima, out)
        return out

    return add


def _last_bits_changed() -> Sum:
    """Return a function that adds gradients in fp32, but changes the last bit of each element of
    its first sum. (The optimizer rounds a change of a single element away.)
    """
    first = True

    def add(parts: Sequence[np.ndarray]) -> np.ndarray:
        nonlocal first
        total = in_fp32(parts)
        if first:
            total.view(np.uint32)[:] ^= 1
        first = False
        return total

    return add


CONTROL = "fp32, last bits of one sum changed"
WAYS: dict[str, Sum] = {"fp32": in_fp32, CONTROL: _last_bits_changed()} | {
    wire: as_integers(width) for wire, width in WIDTH.items()
}


class Workers:
    """A single model that computes for all workers, one after another."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.run.seed)
        self.job, self.model = job, build_model(job, "cpu")
        self.optimizer = build_optimizer(job, self.model.parameters())
        parts = split(self.model, job.model.blocks)
        groups = {
            p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }
        laid_out = table(parts, groups, DTYPES[job.model.dtype], job.store.chunk_elements)
        self.params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
        self.chunks: list[Chunk] = list(laid_out.trainable)

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of the last backward, one fp32 array for each chunk, and clear them
        in the model.
        """
        out = []
        for chunk in self.chunks:
            flat = np.zeros(chunk.numel, np.float32)
            for span in chunk.spans:
                grad = self.params[span.param].grad
                if grad is not None:
                    stop = span.origin + span.stop - span.start
                    flat[span.start : span.stop] = grad.reshape(-1)[span.origin : stop].numpy()
            out.append(flat)
        self.optimizer.zero_grad()
        return out

    def take(self, sums: Sequence[np.ndarray], workers: int) -> None:
        """Set the gradient of each parameter to its sum divided by the number of workers."""
        for p in self.params:
            p.grad = torch.zeros_like(p)
        for chunk, total in zip(self.chunks, sums):
            mean = torch.from_numpy(total) / workers
            for span in chunk.spans:
                grad = self.params[span.param].grad
                assert grad is not None
                stop = span.origin + span.stop - span.start
                grad.view(-1)[span.origin : stop] = mean[span.start : span.stop]


def held_out_loss(workers: Workers, tokens: Tokens) -> float:
    """Return the mean held-out loss of the present parameters, in nats per token."""
    job, cpu = workers.job, torch.device("cpu")
    batches = tokens.held_out_batches(HELD_OUT, 4, job.data.seq_len)
    with torch.no_grad():
        return fmean(loss_of(workers.model, *rows, cpu).item() for rows in batches)


def train(job: Job, tokens: Tokens, add: Sum, steps: int, way: str) -> tuple[list[float], float]:
    """Train, and return (mean of the workers' losses in each step, held-out loss after the last
    step).

    Args:
        add: function that sums the gradients of the workers
        way: name of the number format, for the printed progress
    """
    workers, losses, begin = Workers(job), list[float](), perf_counter()
    cpu = torch.device("cpu")
    for number in range(steps):
        lr = learning_rate(job, number)
        for group in workers.optimizer.param_groups:
            group["lr"] = lr
        found, each = [], []
        for rank in range(WORKERS):
            rows = tokens.batch(number, rank, job.data.batch_size, job.data.seq_len)
            loss = loss_of(workers.model, *rows, cpu)
            loss.backward()
            each.append(loss.item())
            found.append(workers.gradients())
        workers.take([add(parts) for parts in zip(*found)], WORKERS)
        if job.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(workers.model.parameters(), job.optimizer.clip_norm)
        workers.optimizer.step()
        losses.append(fmean(each))
        if number + 1 == 3 or (number + 1) % 50 == 0:
            left_s = (perf_counter() - begin) / (number + 1) * (steps - number - 1)
            print(
                f"{way}: step {number + 1} of {steps}, loss {losses[-1]:.3f}, about {left_s:.0f} s"
                " to go",
                flush=True,
            )
    return losses, held_out_loss(workers, tokens)


def rows(bench: Bench) -> list[Row]:
    """Train with every number format and compare the losses."""
    quick = bench.quick
    steps, tail = (12, 4) if quick else (STEPS, TAIL)
    shorter = {"data.seq_len": SEQ_LEN, "data.batch_size": 1}
    job = load_job(str(JOB), {"run.dir": "runs/fanin-convergence", "run.device": "cpu", **shorter})
    if quick:
        job = job.changed({"data.seq_len": 32, "model.config.num_hidden_layers": 2})
    torch.set_num_threads(cores())
    tokens = Tokens(job.data.paths, job.data.tokenizer, job.data.held_out, job.run.seed)
    job = fitted(job, tokens)
    found = {way: train(job, tokens, add, steps, way) for way, add in WAYS.items()}
    held = {way: loss for way, (_, loss) in found.items()}
    last = {way: fmean(losses[-tail:]) for way, (losses, _) in found.items()}
    case = f"{JOB.name}, {WORKERS} workers, {steps} steps{', a smaller model' if quick else ''}"
    out = [_against(case, CONTROL, held, None)]
    for wire, goal in GOALS.items():
        out += [_beside(case, f"held-out loss, gradients as {wire}", held, wire)]
        out += [_beside(case, f"mean of the last {tail} losses, as {wire}", last, wire)]
        out += [_against(case, wire, held, goal)]
    return out


def _beside(case: str, metric: str, losses: Mapping[str, float], way: str) -> Row:
    return Row(case, metric, "nats", losses[way], losses["fp32"], "fp32")


def _against(case: str, way: str, losses: Mapping[str, float], goal: float | None) -> Row:
    """Build the row of a number format: the relative difference of its held-out loss from that of
    fp32. `goal`: largest allowed difference.
    """
    off = losses[way] / losses["fp32"] - 1
    bar, met = (None, None) if goal is None else (f"within {100 * goal:g}", abs(off) <= goal)
    return Row(case, f"{way}, against fp32", "%", 100 * off, goal=bar, met=met)
