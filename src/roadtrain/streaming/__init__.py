"""Code that runs the blocks of a torch module on parameters that are fetched before a block
computes and released afterwards. Read `block_stream.py` first, then `split.py`."""
