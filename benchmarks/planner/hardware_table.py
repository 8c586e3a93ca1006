"""The hardware table of README.md: where the state of six models fits on six machines, by
`roadtrain fit`. `python -m benchmarks.planner.hardware_table` prints it; a test compares it."""

from __future__ import annotations

from roadtrain.planner.fit import RANK, evaluate
from roadtrain.planner.fit_inputs import machine_of, model_of
from roadtrain.planner.process_memory import PlacedLayout, Training

MODELS = (
    "GPT-2-XL",
    "Qwen2.5-7B",
    "LLaMA-2-13B",
    "Qwen2.5-32B",
    "LLaMA-3-70B",
    "Mixtral-8x22B",
)
MACHINES = {  # name -> device, memory and disks, as options of `fit`
    "no GPU, 32 GB, 1 TB": ("cpu", "32GB", "1TB"),
    "RTX 3090, 64 GB, 2 TB": ("RTX 3090", "64GB", "2TB"),
    "RTX 4090, 128 GB, 2 x 2 TB": ("RTX 4090", "128GB", "2x7GB/s,2TB"),
    "A100 80 GB, 512 GB, 4 x 4 TB": ("A100-80GB", "512GB", "4x7GB/s,4TB"),
    "H100 80 GB, 1 TB, 4 x 4 TB": ("H100-80GB", "1024GB", "4x7GB/s,4TB"),
    "H200 141 GB, 2 TB, 8 x 4 TB": ("H200-141GB", "2048GB", "8x7GB/s,4TB"),
}
TOKENS = 1024


def hardware_table() -> str:
    """Return the table of the README as Markdown: where the state of a full fine-tune, or else of
    LoRA, fits on common machines."""
    lines = [
        "| | " + " | ".join(MODELS) + " |",
        "|---" * (len(MODELS) + 1) + "|",
    ]
    trainings = [
        [Training(model, PlacedLayout(model.layout, "bf16", rank=rank)) for rank in (0, RANK)]
        for model in (model_of(name, TOKENS) for name in MODELS)
    ]
    for name, options in MACHINES.items():
        machine, cells = machine_of(*options), []
        for kinds in trainings:
            rows = (evaluate(kind, state, machine) for kind in kinds for state in ("RAM", "SSDs"))
            row = next((row for row in rows if not row.lacking), None)
            of_lora = "LoRA, " if row and row.training.placed.rank else ""
            cells.append(f"{of_lora}{row.state}" if row else "no")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(hardware_table())
