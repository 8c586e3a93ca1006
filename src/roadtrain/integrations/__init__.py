"""One file for each framework: ddp, fsdp, horovod, huggingface.

A script keeps its framework's way of training and changes one line. Read the file of the framework.
"""
