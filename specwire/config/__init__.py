"""Settings as flags, environment and dataclasses: one class a command, checked when it is built."""
