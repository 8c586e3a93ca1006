"""A script with Hugging Face's Trainer as a user would write it; tests run and kill it.

    trainer_run.py STORE OUT OPTIONS

OPTIONS are JSON. Prints a line for each step and each logged mean.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import transformers

from roadtrain.integrations.huggingface import Placed


class Trainer(transformers.Trainer):
    """Keeps the last loss unrounded."""

    def compute_loss(self, *args, **options):
        out = super().compute_loss(*args, **options)
        self.last = float(out[0] if isinstance(out, tuple) else out)
        return out


class Lines(transformers.TrainerCallback):
    def __init__(self, kill):
        self.kill = kill

    def on_step_end(self, args, state, control, **others):
        rate = others["lr_scheduler"].get_last_lr()[0]
        print("step", state.global_step, trainer.last.hex(), rate.hex(), state.epoch, flush=True)
        if self.kill == state.global_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            print("mean", state.global_step, float(logs["loss"]).hex(), flush=True)


store, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.manual_seed(options.get("seed", 0))
config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64)
rows = torch.randint(0, 64, (10, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
args = transformers.TrainingArguments(
    output_dir=out,
    max_steps=options.get("steps", 12),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=options.get("accumulate", 1),
    learning_rate=1e-2,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=3,
    logging_steps=4,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    accelerator_config={"use_seedable_sampler": options.get("seedable", True)},
)
trainer = Trainer(
    transformers.GPT2LMHeadModel(config),
    args,
    train_dataset=data,
    eval_dataset=data[:4],
    callbacks=[Lines(options.get("kill"))],
    optimizer_cls_and_kwargs=(
        Placed,
        {"optimizer": torch.optim.AdamW, "store": store, "host_budget": "128MiB"},
    ),
)
trainer.train(resume_from_checkpoint=options.get("resume"))
trainer.optimizer.optimizer.close()
