"""A timeline of one generation from its spans: which service worked when, overlaps, prepared rounds.

`spans` reads OTLP, `layout` places bars, `picture` and `perfetto` write them, `receiver` receives spans of
running services, `command` is `specwire timeline`.
"""
