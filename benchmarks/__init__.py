"""Benchmarks: specwire and transformers side by side in one run; see `benchmarks.__main__`."""
