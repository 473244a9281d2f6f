"""The command `specwire`."""
