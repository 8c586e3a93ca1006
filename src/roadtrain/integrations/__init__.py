"""Integrations with training frameworks, one file each: ddp, fsdp, horovod, huggingface. The
docstring of each file shows the line to change or add in a training script."""
