"""The SDK: requests, streams, several coordinators, resuming after failures."""
