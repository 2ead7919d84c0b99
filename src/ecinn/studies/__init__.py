"""The reproduction: the paper's figures and claims, benchmarks, judges."""
