"""What Ctrl-C means to a service: an end within 3 s, as someone waits for the prompt. Imports nothing."""

GRACE_S = 1.0
"""What running requests get to finish."""
SAID = f"interrupted: running requests get {GRACE_S:g} s; Ctrl-C again ends at once"
"""The one line about it."""
