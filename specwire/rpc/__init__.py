"""gRPC servers and channels: limits, drain, deadlines, errors as statuses."""
