"""How models write tool calls, and calls in texts; `bodies/calling.py` has their fields, and forced calls."""
