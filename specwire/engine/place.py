"""Where a model runs, for the handshake: who shares a processor with whom decides what work ahead costs."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import torch

from specwire.config.models import EMULATED
from specwire.config.services import ModelServiceConfig
from specwire.engine.threads import known_cores

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def place(config: ModelServiceConfig, runner: Any, num_threads: int) -> dict[str, Any]:
    """Fields of a `ModelInfo`."""
    cores = known_cores()
    if config.model.startswith(EMULATED) or config.least_pass_ms:
        devices = [f"none {uuid.uuid4().hex}"]  # passes mostly sleep, beside whatever works
    elif ranks := getattr(runner, "locations", None):
        devices = [f"{rank.host} {rank.device}" for rank in ranks if rank.device != "cpu"]
    elif config.device.startswith("cuda"):
        devices = [str(torch.cuda.get_device_properties(torch.device(config.device)).uuid)]
    else:
        devices = []
    num_cores = max(1, int(min(each.num for each in cores))) if cores else torch.get_num_threads()
    return {"host": host(), "devices": tuple(devices), "num_cores": num_cores, "num_threads": num_threads}


def host() -> str:
    """Names this machine, until it starts again."""
    if not _BOOT_ID.exists():
        return f"{uuid.getnode():x}"
    return hashlib.sha256(_BOOT_ID.read_bytes()).hexdigest()[:16]
