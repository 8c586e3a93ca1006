"""Integrations with training frameworks, one file each: ddp, fsdp, horovod, huggingface.

A script keeps its framework's way of training and changes one line. Read the framework's file.
"""
