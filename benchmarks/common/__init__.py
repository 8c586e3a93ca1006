"""Code that several benchmarks share: reports, child processes and the 420 M parameter model."""
