"""Benchmarks: specwire and transformers side by side in one run; see `benchmarks.__main__`."""

import os

# Read when gRPC is imported. Benchmarks start services while gRPC's threads run here: a child would run its
# handlers between fork and exec, where they may abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
