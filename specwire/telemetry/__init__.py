"""Traces, metrics, and stacks of a hung process."""
