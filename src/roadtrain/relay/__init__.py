"""A host's agent beside the network card, which communicates on behalf of the host's workers."""
