"""Whether weights and KV caches fit into the memory that is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specwire.config import cuda
from specwire.config.flags import flag_name
from specwire.config.preflight.sizes import ModelSize
from specwire.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS_AND_USES = (
    ("memory.max", "memory.current"),  # cgroup v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # v1
)
_UNLIMITED = 1 << 62
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Footprint:
    """A model on a device, once or several times.

    Attributes:
        name, source: the field that names the model, and its value.
        device: cpu, or cuda:N.
        num_kv_tokens: size of each KV cache; 0 where it takes what is left.
    """

    name: str
    source: str
    device: str
    size: ModelSize
    num_kv_tokens: int
    count: int = 1

    @property
    def weights(self) -> int:
        """Bytes."""
        return self.size.weights * self.count

    @property
    def kv_cache(self) -> int:
        """Bytes."""
        return self.size.kv_per_token * self.num_kv_tokens * self.count


def check(loads: Sequence[Footprint]) -> None:
    """Refuse what does not fit beside each other.

    Raises:
        ConfigError: names the flag, what it needs and what there is.
    """
    by_device: dict[str, list[Footprint]] = defaultdict(list)
    for load in loads:
        by_device[load.device].append(load)
    for device, there in by_device.items():
        num_bytes = free_host_bytes() if device == "cpu" else cuda.total_bytes(device)
        if num_bytes:
            _check_device(device, there, num_bytes)


def _check_device(device: str, loads: Sequence[Footprint], num_bytes: int) -> None:
    weights, caches = sum(load.weights for load in loads), sum(load.kv_cache for load in loads)
    there = f"{gigabytes(num_bytes)} of memory {'is free' if device == 'cpu' else f'has {device}'}"
    if weights > num_bytes:
        load = max(loads, key=lambda each: each.weights)
        raise ConfigError(
            f"{flag_name(load.name)} {load.source}: {_times(load)}its weights take "
            f"{gigabytes(load.weights)} in {load.size.dtype}, and {there}; "
            "give a smaller model or a narrower --dtype"
        )
    if weights + caches > num_bytes:
        most = (num_bytes - weights) * loads[0].num_kv_tokens // caches
        raise ConfigError(
            f"--num-kv-tokens {loads[0].num_kv_tokens}: the KV cache takes {gigabytes(caches)} beside "
            f"{gigabytes(weights)} of weights, and {there}; give at most {most}"
        )


def _times(load: Footprint) -> str:
    return f"{load.count} times " if load.count > 1 else ""


def gigabytes(num_bytes: int) -> str:
    """In GB, or in MB below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def free_host_bytes() -> int:
    """Bytes that can still be allocated on this machine, within the limit of a container."""
    limit, used = _cgroup(_CGROUP)
    return min(_meminfo("MemAvailable"), max(0, limit - used))


def total_host_bytes() -> int:
    """Bytes of this machine, within the limit of a container."""
    return min(_meminfo("MemTotal"), _cgroup(_CGROUP)[0])


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} does not say {name}")


def _cgroup(directory: Path) -> tuple[int, int]:
    """Bytes that a container may use, practically infinite without a limit, and that it uses."""
    for names in _LIMITS_AND_USES:
        try:
            limit, used = ((directory / name).read_text().strip() for name in names)
        except OSError:
            continue
        return _UNLIMITED if limit == "max" else int(limit), int(used)
    return _UNLIMITED, 0
