"""A picture of one generation from its spans: who worked when, what overlapped, which rounds were hits.

`spans` reads OTLP, `layout` decides what is drawn where, `picture` and `page` draw it, `receiver` takes
spans from running services, `command` is `specwire timeline`.
"""
