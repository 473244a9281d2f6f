"""A proxy that delays, degrades and cuts connections."""
