"""Optimal shares: divide the summation of a gradient among hosts so that the load of the busiest
link is minimal. No I/O. Ignores links that are shared or carry other traffic.

Let n worker hosts have full-duplex links of rates b_i, and spare hosts links of rates c_j. Of a
gradient of M bytes, worker host i sums x_i M bytes, and spare host j sums y_j M bytes. The shares
add up to 1. Worker host i sends M (1 - x_i) bytes of gradients, and each of its sums n - 1 times. A
spare host sends each of its sums n times. Each host receives as much as it sends. So an exchange
takes at least

    T M = max( M (1 + (n - 2) x_i) / b_i,  n y_j M / c_j )

Proof that `optimum` is the least T. For a given T the shares are bounded: x_i <= (T b_i - 1) / (n -
2) and y_j <= T c_j / n; x_i >= 0 needs T >= 1 / b_i for every i. Both bounds grow with T, so T is
feasible if and only if T >= max 1/b_i =: T0 and the bounds add up to at least 1:

    T (sum b / (n - 2) + sum c / n) - n / (n - 2) >= 1    =>    T1 = (1 + n/(n-2)) / (sum b / (n-2)
                                                                + sum c / n)

The least T is max(T0, T1). At T1 the shares equal the bounds. If T0 > T1, any shares below the
bounds are optimal; `optimum` scales the bounds to add up to 1. For n = 2, T = T0 for any shares.
With b = c = 1 and k spare hosts, T is t_opt in Jiang et al. (BytePS, OSDI 2020), section 4.1: 2 n
(n - 1) / (n^2 + k n - 2 k).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roadtrain.errors import ConfigError
from roadtrain.units import round_up

ALIGN = 1024  # elements; aligns parts to pages for a 4-byte dtype


def optimum(workers: Sequence[float], spares: Sequence[float] = ()) -> tuple[float, ...]:
    """Compute the optimal shares.

    Args:
        workers: Link rates of the worker hosts, in bytes/s each way.
        spares: Link rates of the spare hosts.

    Returns:
        The shares of the worker hosts, then of the spare hosts.

    Raises:
        ConfigError: There is no worker host, or a rate is not positive.
    """
    n = len(workers)
    if not n or any(not rate > 0 for rate in (*workers, *spares)):
        raise ConfigError(
            f"invalid link rates: workers {[*workers]}, spare hosts {[*spares]} bytes/s",
            hint="give at least one worker host, and only rates above 0",
        )
    if n == 1:
        return (1, *(0,) * len(spares))
    seconds = max(1 / rate for rate in workers)
    unit = seconds / seconds  # 1 in the type of the rates, such as Fraction
    if n == 2:
        own = [unit] * n
    else:
        seconds = max(
            seconds,
            (1 + n * unit / (n - 2)) / (sum(workers) / (n - 2) + sum(rate / n for rate in spares)),
        )
        own = [(seconds * rate - 1) / (n - 2) for rate in workers]
    others = [seconds * rate / n for rate in spares]
    total = sum(own) + sum(others)
    return tuple(share / total for share in (*own, *others))


def busiest(workers: Sequence[float], spares: Sequence[float], shares: Sequence[float]) -> float:
    """Return the seconds that an exchange of one byte takes with these shares: T in the formula
    above."""
    n = len(workers)
    own = [(1 + (n - 2) * x) / rate for x, rate in zip(shares, workers)] if n > 1 else [0.0]
    return max([*own, *(n * y / rate for y, rate in zip(shares[n:], spares))])


def cut(elements: int, part_elements: int) -> tuple[tuple[int, int], ...]:
    """Cut a tensor into parts of about `part_elements` elements. Returns (first element, element
    after the last) of each part."""
    if not elements:
        return ()
    size = round_up(-(-elements // -(-elements // part_elements)), ALIGN)
    return tuple((at, min(at + size, elements)) for at in range(0, elements, size))


def reducers(key: int, parts: int, shares: Mapping[int, float]) -> list[int]:
    """Assign each of `parts` parts of tensor `key` to a reducer. Returns the reducer of each part.

    All workers compute the same assignment without communication. Each reducer gets its share of
    the parts, rounded up or down, and exactly its share on average over many tensors.
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
    """Hash a key to [0, 1) with splitmix64, the same on all hosts."""
    mask = (1 << 64) - 1
    x = (key + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return float((x ^ (x >> 31)) >> 11) / (1 << 53)


def order(of: Sequence[int], rank: int) -> list[int]:
    """Return the order in which worker `rank` sends its parts, so that all links stay busy. `of` is
    the reducer of each part."""
    own: dict[int, list[int]] = {}
    for number, reducer in enumerate(of):
        own.setdefault(reducer, []).append(number)
    most = max(map(len, own.values()), default=0)
    turns: list[list[int]] = [[] for _ in range(most)]
    for j, numbers in enumerate(own.values()):
        # spreads the parts of reducers that have few parts over the turns
        phase = (2 * j + 1) / (2 * len(own))
        for i, number in enumerate(numbers):
            turns[int((i + phase) * most / len(numbers))].append(number)
    return [n for turn in turns for n in [*turn[rank % len(turn) :], *turn[: rank % len(turn)]]]
