"""Plain references that the tags and integers of the fan-in's packets must equal bit for bit.
(Separate from references.py because tests of the core, which import that, know no switch.)"""

from __future__ import annotations

import numpy as np

from roadtrain.kernels.cast import reference_widen
from roadtrain.switch.fixed_point import BIAS, NOT_FINITE, ZERO, blocks_of
from roadtrain.switch.packets import BLOCK, HEADER, PacketKey


def reference_siphash(key: bytes, message: bytes) -> int:
    """SipHash-2-4 of a message with a key of 16 bytes."""
    mask = (1 << 64) - 1
    k = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    constants = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [k[i % 2] ^ constants[i] for i in range(4)]

    def mix(x: int, y: int, by: int) -> None:
        v[x] = (v[x] + v[y]) & mask
        v[y] = ((v[y] << by | v[y] >> (64 - by)) & mask) ^ v[x]

    def turn(x: int) -> None:
        v[x] = (v[x] << 32 | v[x] >> 32) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            mix(0, 1, 13)
            turn(0)
            mix(2, 3, 16)
            mix(0, 3, 21)
            mix(2, 1, 17)
            turn(2)

    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def reference_tag(packet: bytes, key: PacketKey) -> int:
    """The tag of a packet."""
    fields = HEADER.fields
    assert fields is not None
    at = fields["tag"][1]
    covered = packet[:at] + packet[at + 8 :]
    covered += bytes(-len(covered) % 8)
    pairs = np.frombuffer(covered, "<u4").reshape(-1, 2)
    hashes = []
    for shift in (0, 1):
        mine = key.words[shift : shift + len(pairs)].view(np.uint32).reshape(-1, 2)
        sums = (pairs + mine).astype(np.uint64)
        hashes.append(int((sums[:, 0] * sums[:, 1]).sum(dtype=np.uint64)))
    message = b"".join(part.to_bytes(8, "little") for part in (*hashes, len(packet)))
    return reference_siphash(np.array(key.sip, "<u8").tobytes(), message)


def reference_exponents(values: np.ndarray, dtype: str) -> np.ndarray:
    """Exponents of all blocks, uint8 [blocks_of(N)]."""
    wide = reference_widen(values, dtype).astype(np.float64)
    padded = np.zeros(blocks_of(wide.size) * BLOCK)
    padded[: wide.size] = np.abs(wide)
    most = padded.reshape(-1, BLOCK).max(axis=1)  # NaN if any element is NaN
    e = np.frexp(np.where(np.isfinite(most), most, 1.0))[1]
    found = np.where(most == 0, ZERO, np.clip(e + BIAS, 1, 254))
    return np.where(np.isfinite(most), found, NOT_FINITE).astype(np.uint8)


def _magnitude_bits(workers: int, width: int) -> int:
    return 8 * width - 1 - (workers - 1).bit_length()


def reference_quantize(
    values: np.ndarray, dtype: str, maxima: np.ndarray, workers: int, width: int
) -> np.ndarray:
    """Quantized values, int32 [N]."""
    bits = _magnitude_bits(workers, width)
    wide = reference_widen(values, dtype).astype(np.float64)
    e = np.repeat(maxima.astype(np.int64), BLOCK)[: wide.size]
    none = (e == ZERO) | (e == NOT_FINITE)
    q = np.rint(np.ldexp(np.where(none, 0.0, wide), bits - (e - BIAS)))
    top = (1 << bits) - 1
    return np.clip(q, -top, top).astype(np.int32)


def reference_dequantize(
    total: np.ndarray, maxima: np.ndarray, workers: int, width: int
) -> np.ndarray:
    """Values of summed integers [N] as float32 [N]."""
    bits = _magnitude_bits(workers, width)
    e = np.repeat(maxima.astype(np.int64), BLOCK)[: total.size]
    wide = np.ldexp(total.astype(np.float64), e - BIAS - bits)
    wide[e == ZERO], wide[e == NOT_FINITE] = 0.0, np.nan
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)
