"""What the measured systems are called."""

from __future__ import annotations

PLAIN = "transformers generate"
ASSISTED = "transformers assisted"
ASSISTED_CONSTANT = "transformers assisted, constant"
NO_SPECULATION = "specwire without speculation"
SPECWIRE = "specwire"
LOCKSTEP = "specwire, lockstep"
PREPARED = "specwire, prepared outcomes"
CONTINUOUS = "transformers continuous batching"
