"""Integrations with training frameworks, one file each: ddp, fsdp, horovod, huggingface.

A training script of one of these frameworks needs one changed or added line. The docstring of the
framework's file shows this line.
"""
