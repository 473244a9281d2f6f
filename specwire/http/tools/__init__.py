"""How models write tool calls, and calls in texts; `bodies/tools.py` has their fields, and forced calls."""
