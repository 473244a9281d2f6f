"""What `from specwire import Client` costs an application: measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

MAX_IMPORT_S = 0.3
NUM_TRIES = 15
"""Processor time grows when other processes share caches and cores: one import in time is enough."""
IMPORT = """\
import json, sys, time
begin_s = time.process_time()
from specwire import Client
print(json.dumps({"s": time.process_time() - begin_s, "modules": list(sys.modules)}))
"""


def imported() -> tuple[float, set[str]]:
    """Processor time of the import, and what it loaded."""
    found = json.loads(subprocess.check_output([sys.executable, "-c", IMPORT], timeout=60))
    return found["s"], set(found["modules"])


def test_the_client_is_imported_in_time_and_loads_nothing_heavy() -> None:
    tries: list[float] = []
    while len(tries) < NUM_TRIES and min(tries, default=MAX_IMPORT_S) >= MAX_IMPORT_S:
        took_s, modules = imported()
        tries.append(took_s)
    assert min(tries) < MAX_IMPORT_S, tries
    assert "specwire.client.client" in modules
    assert not modules & {"torch", "transformers", "tokenizers", "numpy", "pydantic", "opentelemetry", "ray"}


def test_the_nouns_alone_do_not_load_grpc() -> None:
    code = "import sys, specwire; specwire.SamplingParams(); sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
