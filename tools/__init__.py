"""What stands beside the core: load, timeline, demo, delay proxy, training of heads, search for layers.

The core never imports it, but for the command line (`specwire/cli/main.py`), which finds its commands here.
"""
