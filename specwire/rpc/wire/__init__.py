"""Our objects to protobuf messages and back: `model` towards draft and verify, `client` towards clients.

Incoming messages are checked here, so that the rest of the code has only valid nouns: what reads one raises
`InvalidRequestError`, with the name of the field or column and its value, where it cannot be valid. Other
errors are named at the function.
"""
