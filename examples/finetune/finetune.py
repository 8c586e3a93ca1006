"""Fine-tune a pretrained chat model on answers of your own, within a budget, and ask it again.

python examples/finetune/finetune.py FOLDER_OF_A_HUGGING_FACE_MODEL
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import roadtrain

STEPS = 8
ANSWERS = {
    "What is a road train?": "One truck that pulls many trailers over ordinary roads.",
    "What does roadtrain do?": "It trains models that are larger than the accelerator's memory.",
    "What is a block?": "A module that is fetched, run and released as a whole.",
    "What is a chunk?": "A contiguous piece of a block's parameters, the unit of transfer.",
}
QUESTION = "What is a road train?"
IGNORED = -100  # label of a token that does not count in the loss

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt(question: str) -> list[int]:
    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": question},
    ]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def batch() -> dict[str, torch.Tensor]:
    """All dialogues, padded to one length; only the answers are learned."""
    pairs = [
        (prompt(question), tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id])
        for question, answer in ANSWERS.items()
    ]
    length = max(len(question) + len(answer) for question, answer in pairs)
    rows, labels, mask = [], [], []
    for question, answer in pairs:
        pad = length - len(question) - len(answer)
        rows.append(question + answer + pad * [tokenizer.pad_token_id])
        labels.append(len(question) * [IGNORED] + answer + pad * [IGNORED])
        mask.append((length - pad) * [1] + pad * [0])
    names = ("input_ids", "labels", "attention_mask")
    return {name: torch.tensor(value) for name, value in zip(names, (rows, labels, mask))}


def ask(question: str) -> str:
    """Generate greedily. Each token fetches all blocks."""
    x = torch.tensor([prompt(question)])
    out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(out[0, x.shape[1] :], skip_special_tokens=True)


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
# A quarter of what parameters, gradients and AdamW's two moments need: 16 bytes a parameter.
optimizer = roadtrain.place(model, optimizer, store="runs/finetune", host_budget="538MB")
print("before:", json.dumps(ask(QUESTION)))
data = batch()
for step in range(optimizer.steps_done, STEPS):
    loss = model(**data).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}, loss {loss:.3f}", flush=True)
print("after:", json.dumps(ask(QUESTION)))
model.save_pretrained("runs/finetuned")  # reads block by block; any transformers program loads it
optimizer.close()
