"""What every system continues: beginnings of Python modules, written for this benchmark."""

from __future__ import annotations

PROMPTS = (
    '''"""Read and write simple configuration files."""

import os
import re
import sys


class ConfigReader:
    """Parse lines of the form ``name = value``."""

    def __init__(self, filename, encoding=None):
        self.filename = filename
''',
    '''def merge_intervals(intervals):
    """Return the intervals sorted, with overlapping ones joined."""
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
''',
    '''import threading
import time
from collections import deque


class BoundedQueue:
    """A queue that blocks when it is full.

    All methods may be called from any thread.
    """

    def __init__(self, maxsize):
        self._items = deque()
        self._lock = threading.Lock()

    def put(self, item, timeout=None):
''',
    '''def parse_header(line):
    """Split a header line into its name and its value.

    >>> parse_header("Content-Type: text/plain")
    ('Content-Type', 'text/plain')
    """
    if not isinstance(line, str):
        raise TypeError("line must be a string, not %s" % type(line).__name__)
''',
)
