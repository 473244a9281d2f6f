"""Traces, metrics, and the stacks of a process that hangs."""
