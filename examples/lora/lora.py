"""Train LoRA adapters with Hugging Face's Trainer; the base model stays in files.

python examples/lora/lora.py FOLDER_OF_A_HUGGING_FACE_MODEL
"""

import json
import sys

import peft
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from roadtrain.integrations.huggingface import Placed

RULES = (
    "Rule 1 of roadtrain: training is exact by default.",
    "Rule 3 of roadtrain: a finished step is durable.",
    "Rule 4 of roadtrain: memory is bounded.",
    "Rule 5 of roadtrain: nothing hangs.",
)
PROMPT = "Rule 3 of roadtrain:"

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
torch.manual_seed(0)  # of the adapters' first values
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
model = peft.get_peft_model(base, config)
model.print_trainable_parameters()


def complete(prompt: str) -> str:
    x = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**x, max_new_tokens=7, do_sample=False)
    return tokenizer.decode(out[0, x["input_ids"].shape[1] :], skip_special_tokens=True)


args = TrainingArguments(
    "runs/lora-checkpoints",
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=3,
    save_strategy="no",  # the store has every step
    report_to="none",
    use_cpu=True,
    dataloader_pin_memory=False,
    disable_tqdm=True,
)
# The new line: frozen parameters are only read; gradients and AdamW's state exist for the adapters.
placed = {"optimizer": torch.optim.AdamW, "store": "runs/lora", "host_budget": "450MB"}
trainer = Trainer(
    model,
    args,
    train_dataset=[{"input_ids": tokenizer(rule)["input_ids"]} for rule in RULES],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    optimizer_cls_and_kwargs=(Placed, placed),
)
print("before:", json.dumps(complete(PROMPT)))
trainer.train()
print("after:", json.dumps(complete(PROMPT)))
# Only the adapters' values are read, not those of the base.
state = model.state_dict()
adapters = {name: state[name] for name in state if "lora_" in name}
model.save_pretrained("runs/adapter", state_dict=adapters)
trainer.optimizer.optimizer.close()
