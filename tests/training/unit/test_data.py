"""Tokens: the same batch for the same step, always."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roadtrain.errors import ConfigError
from roadtrain.training.data import Tokens, _draw, find_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "text"
    (home / "deep").mkdir(parents=True)
    (home / "site-packages").mkdir()
    (home / "b.py").write_text("bravo " * 900)
    (home / "a.py").write_text("alpha " * 900)
    (home / "deep" / "c.txt").write_text("charlie " * 900)
    (home / "raw.bin").write_bytes(b"\0\1\2")
    (home / "empty.py").write_text("")
    (home / "site-packages" / "other.py").write_text("other " * 900)
    return home


def test_files_folders_globs(folder: Path) -> None:
    names = lambda *paths: [f.name for f in find_files(paths)]  # noqa: E731
    assert names(str(folder)) == ["a.py", "b.py", "c.txt"]
    assert names(f"{folder}/**/*.py") == ["a.py", "b.py"]
    assert names(f"{folder}/b.py", str(folder)) == ["a.py", "b.py", "c.txt"]  # each once
    assert names(f"{folder}/raw.bin") == ["raw.bin"]  # a named file is always read


@pytest.mark.parametrize("path", ["/no/such", "/no/such/*.py"])
def test_a_path_without_data_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"data.paths: '/no/such.* has no text file"):
        Tokens([path])


def test_a_folder_of_packages_named_by_the_user_counts(folder: Path) -> None:
    assert [f.name for f in find_files([str(folder / "site-packages")])] == ["other.py"]


def test_batches_depend_on_the_step_alone(folder: Path) -> None:
    tokens, again = Tokens([str(folder)]), Tokens([str(folder)])
    x, y = tokens.batch(7, 1, 4, 16)
    tokens.batch(3, 0, 4, 16)
    assert torch.equal(again.batch(7, 1, 4, 16)[0], x)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.shape == y.shape == (4, 16) and x.dtype == torch.int64
    # a row does not depend on the number of rows
    assert torch.equal(tokens.batch(7, 1, 2, 16)[0], x[:2])
    reseeded = Tokens([str(folder)], seed=1)
    for other in (
        tokens.batch(8, 1, 4, 16),
        tokens.batch(7, 0, 4, 16),
        reseeded.batch(7, 1, 4, 16),
    ):
        assert not torch.equal(other[0], x)


def test_draws_of_batches_are_frozen() -> None:
    """Frozen values: a change would alter the data of every run."""
    assert (_draw(0, 0, 0, 0), _draw(1, 5, 2, 3)) == (11619761522075635141, 267313895710451850)


def test_held_out_is_never_trained_on(folder: Path) -> None:
    tokens = Tokens([str(folder)], held_out=0.25)
    assert (
        len(tokens.train) + len(tokens.held_out) == sum(f.stat().st_size for f in tokens.files) + 2
    )
    batches = list(tokens.held_out_batches(3, 2, 16))
    assert len(batches) == 3
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, tokens.held_out_batches(3, 2, 16)))
    with pytest.raises(ConfigError, match="held out, but a batch needs"):
        next(iter(tokens.held_out_batches(1, 10**6, 16)))


def test_too_little_text(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a row needs 100001"):
        Tokens([str(folder / "a.py")]).batch(0, 0, 1, 100_000)


def test_fingerprint_sees_the_text(folder: Path) -> None:
    before = Tokens([str(folder)]).fingerprint
    (folder / "a.py").write_text("alphb " * 900)
    assert Tokens([str(folder)]).fingerprint != before


def test_tokenizer_of_a_file(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], show_progress=False
    )
    bpe.train_from_iterator(["alpha bravo charlie " * 9], trainer)
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokens = Tokens([str(folder)], str(tmp_path / "tokenizer.json"), held_out=0)
    assert tokens.vocab_size == bpe.get_vocab_size() and tokens.train.max() < tokens.vocab_size
    assert (tokens.train == bpe.token_to_id("</s>")).sum() == 3  # an end token after each file
    with pytest.raises(ConfigError, match="no file"):
        Tokens([str(folder)], "missing.json")
