"""A proxy that delays what passes through it."""
