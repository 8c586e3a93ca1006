"""Integrations with training frameworks, one file each: ddp, fsdp, horovod, huggingface.

A script trains as before, with one changed line. Read the file of the framework that it uses.
"""
