"""The variables that any process reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specwire.config.client import ClientConfig, HttpConfig
from specwire.config.flags import refuse_unknown_variables
from specwire.config.link import ProxyConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig

ALL_CONFIGS: tuple[type[Any], ...] = (
    DraftConfig,
    VerifyConfig,
    CoordinatorConfig,
    UpConfig,
    ClientConfig,
    HttpConfig,
    ProxyConfig,
)


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse `SPECWIRE_*` variables that no process reads; raises ConfigError."""
    refuse_unknown_variables(ALL_CONFIGS, environ)
