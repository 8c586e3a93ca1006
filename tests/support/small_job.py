"""The job of a small Llama on a text of 600 lines, for tests that run `roadtrain train`."""

from __future__ import annotations

from pathlib import Path

SMALL_JOB = """
run.dir = "{home}/run"
run.steps = {steps}
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[data]
paths = ["{home}/text"]
seq_len = 16
batch_size = 2
held_out = 0
"""


def small_job(home: Path, steps: int, layers: int = 2) -> str:
    """The text of the job; further keys begin with the table that they belong to."""
    return SMALL_JOB.format(home=home, steps=steps, layers=layers)


def write_small_job(home: Path, steps: int, more: str = "", layers: int = 2) -> Path:
    """Write the job and its text into `home`. more: further lines of the job."""
    text = home / "text" / "a.txt"
    text.parent.mkdir(exist_ok=True)
    text.write_text("".join(f"line {i} of the text, {i * i}\n" for i in range(600)))
    path = home / "job.toml"
    path.write_text(small_job(home, steps, layers) + more)
    return path
