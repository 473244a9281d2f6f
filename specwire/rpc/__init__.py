"""gRPC servers and channels: limits, drain, deadlines, errors as statuses."""

import os

# Lost connections are errors of their calls; gRPC would log them beside a command's output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
