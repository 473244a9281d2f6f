"""Draft and verify services: which there are, which one serves a stream, and what they send."""
