"""Tokens: batches of tokens from text files.

A row (one sequence) of a batch depends only on the seed, the step, the micro-batch (counted over
all workers) and the row's index. Therefore a run sees the same data after it is resumed, and with
any number of workers. Parts of the whole text are held out, so that the held-out text resembles the
training text. All tokens are kept in memory. Nothing is downloaded.
"""

# B = rows of a batch, T = seq_len

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roadtrain.environment import need
from roadtrain.errors import ConfigError

PIECES = 64
SEPARATOR = b"\0"  # token between two files, if tokens are bytes
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "[SEP]")
_NOT_TEXT = {"site-packages", "dist-packages", "__pycache__"}


class Tokens:
    """The tokens of all files under `paths` (files, folders, globs), sorted by path.

    A hash of the tokens is committed with each step, so that a run cannot continue with another
    text. `begun` becomes True before the first step is trained on the tokens.
    """

    def __init__(
        self, paths: Sequence[str], tokenizer: str = "bytes", held_out: float = 0.01, seed: int = 0
    ) -> None:
        """Read and tokenize all files.

        Raises ConfigError for a path without text files, or if the file of the tokenizer does not
        exist.
        """
        self.seed, self.begun = seed, False
        self.files = find_files(paths)
        if tokenizer == "bytes":
            self.vocab_size = 256
            stream = np.frombuffer(SEPARATOR.join(f.read_bytes() for f in self.files), np.uint8)
        else:
            stream, self.vocab_size = _encode(self.files, tokenizer)
        self.fingerprint = hashlib.blake2b(stream.tobytes(), digest_size=16).hexdigest()
        pieces = np.array_split(stream, PIECES if len(stream) >= PIECES**2 else 1)
        cuts = [len(p) - int(len(p) * held_out) for p in pieces]
        self.train = np.concatenate([p[:c] for p, c in zip(pieces, cuts)])
        self.held_out = np.concatenate([p[c:] for p, c in zip(pieces, cuts)])

    def state_dict(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["begun"] and state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"the text has changed since this run began ({state['fingerprint']} before,"
                f" {self.fingerprint} now)",
                hint=(
                    "use a new --run.dir, or the same data.paths, tokenizer and held_out as before"
                ),
            )

    def batch(
        self, step: int, micro: int, batch_size: int, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x_BT, y_BT), int64 tensors of tokens. y_BT has the token that follows each token
        of x_BT. Each row starts at a random position of the training text."""
        room = len(self.train) - seq_len
        if room < 1:
            raise ConfigError(
                f"the text has {len(self.train)} tokens, but a row needs {seq_len + 1} tokens",
                hint="lower data.seq_len, or add text",
            )
        starts = [_draw(self.seed, step, micro, row) % room for row in range(batch_size)]
        return _rows(self.train, starts, seq_len)

    def held_out_rows(self, batch_size: int, seq_len: int) -> int:
        """Return the number of held-out samples. Raises ConfigError if they are less than a
        batch."""
        rows = (len(self.held_out) - 1) // seq_len
        if rows < batch_size:
            raise ConfigError(
                f"{len(self.held_out)} tokens are held out, but a batch needs"
                f" {batch_size * seq_len + 1} tokens",
                hint="raise data.held_out, or set it to 0 for no held-out loss",
            )
        return rows

    def held_out_batches(
        self, n: int, batch_size: int, seq_len: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield at most `n` batches that cover the held-out tokens evenly, the same in every
        call."""
        rows = self.held_out_rows(batch_size, seq_len)
        n = min(n, rows // batch_size)
        starts = [i * rows // (n * batch_size) * seq_len for i in range(n * batch_size)]
        for i in range(n):
            yield _rows(self.held_out, starts[i * batch_size : (i + 1) * batch_size], seq_len)


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the text files under `paths`, sorted by path and without duplicates.

    A folder stands for every text file below it, except installed packages and caches. Raises
    ConfigError for a path without text files.
    """
    found: set[str] = set()
    for path in paths:
        matches = {m for m in _matches(path) if os.path.isfile(m) and (m == path or _is_text(m))}
        if not matches:
            raise ConfigError(
                f"data.paths: {path!r} has no text file",
                hint="name a file, a folder or a glob such as 'src/**/*.py'",
            )
        found |= matches
    return [Path(p) for p in sorted(found)]


def _matches(path: str) -> Iterator[str]:
    """Yield a file, what lies below a folder, or what a glob matches. A glob would look into all
    folders of packages and caches; a folder's files, and FOLDER/**/NAMES, are found without."""
    folder, _, names = (f"{path}/**/*" if os.path.isdir(path) else path).partition("/**/")
    if names and os.path.isdir(folder) and "/" not in names:
        for parent, folders, files in os.walk(folder, followlinks=True):
            folders[:] = [f for f in folders if f[0] != "." and f not in _NOT_TEXT]
            shown = (f for f in files if f[0] != "." or names[0] == ".")
            yield from (os.path.join(parent, f) for f in fnmatch.filter(shown, names))
        return
    wildcard = min((path.index(c) for c in "*?[" if c in path), default=len(path))
    matches = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    yield from (m for m in matches if not _NOT_TEXT & set(m[wildcard:].split(os.sep)))


def _is_text(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def _encode(files: Sequence[Path], tokenizer: str) -> tuple[np.ndarray, int]:
    if not os.path.isfile(tokenizer):
        raise ConfigError(
            f"data.tokenizer: there is no file {tokenizer!r}",
            hint="set data.tokenizer to `bytes`, or to the path of a tokenizer.json",
        )
    bpe = need("tokenizers", "hf").Tokenizer.from_file(tokenizer)
    bpe.no_truncation()
    bpe.no_padding()
    end = next((i for i in map(bpe.token_to_id, _END_OF_TEXT) if i is not None), None)
    size = bpe.get_vocab_size()
    dtype = np.uint16 if size <= 1 << 16 else np.uint32
    parts: list[np.ndarray] = []
    for i in range(0, len(files), 64):
        texts = [f.read_text(encoding="utf-8", errors="replace") for f in files[i : i + 64]]
        for encoded in bpe.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array(encoded.ids if end is None else [*encoded.ids, end], dtype))
    return np.concatenate(parts), size


def _draw(*key: int) -> int:
    """Return a uniformly distributed 64-bit number that depends only on `key`, on every machine."""
    hashed = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")


def _rows(
    stream: np.ndarray, starts: Sequence[int], seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = np.stack([stream[s : s + seq_len + 1] for s in starts])
    rows = torch.from_numpy(found.astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
