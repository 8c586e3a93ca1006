"""Which host sums how much of a gradient, so that the busiest link is as little busy as can be.
Exact, in closed form.

n worker hosts, host i with a full-duplex link of rate b_i, and spare hosts j of rate c_j. Host i
sums the share x_i of M bytes, spare host j the share y_j; together 1. In one exchange a worker host
sends what others sum, M (1 - x_i), and returns its sums to the n - 1 others, (n - 1) x_i M; a spare
host returns each of its sums n times; what arrives is the same. So an exchange cannot be shorter
than

    T M = max( M (1 + (n - 2) x_i) / b_i,  n y_j M / c_j )

Proof that `optimum` is the least T. For a given T the shares are bounded: x_i <= (T b_i - 1) / (n -
2) and y_j <= T c_j / n; x_i >= 0 needs T >= 1 / b_i for every i. Both bounds grow with T, so T is
feasible exactly where T >= max 1/b_i =: T0 and the bounds add up to 1 or more:

    T (sum b / (n - 2) + sum c / n) - n / (n - 2) >= 1    =>    T1 = (1 + n/(n-2)) / (sum b / (n-2)
                                                                + sum c / n)

The least is max(T0, T1). At T1 the bounds are the shares; at T0 > T1 (one slow worker holds up all,
whatever is summed where) any shares below the bounds do, here the bounds scaled to 1. For n = 2 a
worker's link carries M each way whatever it sums: T0. With b = 1 and k spares of rate 1 this is
Jiang et al. (BytePS, OSDI 2020), section 4.1, t_opt = 2 n (n - 1) / (n^2 + k n - 2 k); k = 0 is the
ring's 2 (n - 1) / n, k = n the parameter server's 1.

Pure; also exact with fractions.Fraction. Does NOT know links that are shared, or that carry other
things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roadtrain.errors import ConfigError
from roadtrain.units import round_up

ALIGN = 1024  # elements: parts begin on a page of a 4-byte dtype


def optimum(workers: Sequence[float], spares: Sequence[float] = ()) -> tuple[float, ...]:
    """The best shares for hosts with links of these rates (bytes a second each way): of the worker
    hosts in order, then of the spare ones. Raises ConfigError for a rate that is not above 0."""
    n = len(workers)
    if not n or any(not rate > 0 for rate in (*workers, *spares)):
        raise ConfigError(
            f"links of {[*workers]} and spare ones of {[*spares]} bytes a second",
            hint="one worker host or more, every rate above 0",
        )
    if n == 1:
        return (1, *(0,) * len(spares))
    seconds = max(1 / rate for rate in workers)
    one = seconds / seconds  # in its arithmetic: a Fraction stays one
    if n == 2:
        own = [one] * n
    else:
        seconds = max(
            seconds,
            (1 + n * one / (n - 2)) / (sum(workers) / (n - 2) + sum(rate / n for rate in spares)),
        )
        own = [(seconds * rate - 1) / (n - 2) for rate in workers]
    others = [seconds * rate / n for rate in spares]
    total = sum(own) + sum(others)
    return tuple(share / total for share in (*own, *others))


def busiest(workers: Sequence[float], spares: Sequence[float], shares: Sequence[float]) -> float:
    """Seconds of an exchange of one byte with these shares of all reducers: the formula above."""
    n = len(workers)
    own = [(1 + (n - 2) * x) / rate for x, rate in zip(shares, workers)] if n > 1 else [0.0]
    return max([*own, *(n * y / rate for y, rate in zip(shares[n:], spares))])


def cut(elements: int, part_elements: int) -> tuple[tuple[int, int], ...]:
    """The parts of a tensor, each its first element and the one behind the last, of equal size but
    for the last part: whoever sums them, the same for ever."""
    if not elements:
        return ()
    size = round_up(-(-elements // -(-elements // part_elements)), ALIGN)
    return tuple((at, min(at + size, elements)) for at in range(0, elements, size))


def reducers(key: int, parts: int, shares: Mapping[int, float]) -> list[int]:
    """The reducer that sums each of `parts` parts of tensor `key`, the same for all workers, who
    need not talk: each reducer has as many as its share says, or one more (systematic sampling from
    a start that the key's hash picks), so over many tensors the shares exactly, and a tensor of one
    part goes to a reducer with its share's probability.
    """
    total, at, out = sum(shares.values()), _hash(key), []
    left = [(reducer, share / total * parts) for reducer, share in sorted(shares.items()) if share]
    until, i = left[0][1], 0
    for number in range(parts):
        while number + at >= until and i + 1 < len(left):
            i += 1
            until += left[i][1]
        out.append(left[i][0])
    return out


def _hash(key: int) -> float:
    """In [0, 1): splitmix64, the same everywhere."""
    mask = (1 << 64) - 1
    x = (key + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return float((x ^ (x >> 31)) >> 11) / (1 << 53)


def order(of: Sequence[int], rank: int) -> list[int]:
    """In which a worker sends the parts whose reducers are `of`. All reducers get theirs at the
    pace of their shares, so that no link is idle early and none is crowded late; and workers
    begin each turn with another reducer, so that they do not meet at one."""
    own: dict[int, list[int]] = {}
    for number, reducer in enumerate(of):
        own.setdefault(reducer, []).append(number)
    most = max(map(len, own.values()), default=0)
    turns: list[list[int]] = [[] for _ in range(most)]
    for j, numbers in enumerate(own.values()):
        # reducers with few parts do not all have their turn at once
        phase = (2 * j + 1) / (2 * len(own))
        for i, number in enumerate(numbers):
            turns[int((i + phase) * most / len(numbers))].append(number)
    return [n for turn in turns for n in [*turn[rank % len(turn) :], *turn[: rank % len(turn)]]]
