"""What an accelerator does: memory under a budget, copies, pinned host memory."""
