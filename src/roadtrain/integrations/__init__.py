"""One file a framework: ddp, fsdp, horovod, huggingface."""
