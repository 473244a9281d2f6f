"""Our objects to protobuf messages and back: `model` towards draft and verify, `client` towards clients."""
