"""Measuring a running server under load: `specwire bench serve`."""
