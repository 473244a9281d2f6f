"""Checks before anything is loaded or started: `check(config)`. Imports no torch, and takes under a second.

What only the loaded model can tell stays with the services.
"""

from specwire.config.preflight.plan import check

__all__ = ["check"]
