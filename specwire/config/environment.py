"""The variables that any process reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specwire.config.client import ClientConfig, HttpConfig
from specwire.config.flags import did_you_mean, known_variables, unknown_variables
from specwire.config.link import ProxyConfig
from specwire.config.serve import ServeConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig

log = logging.getLogger(__name__)

ALL_CONFIGS: tuple[type[Any], ...] = (
    DraftConfig,
    VerifyConfig,
    CoordinatorConfig,
    UpConfig,
    ServeConfig,
    ClientConfig,
    HttpConfig,
    ProxyConfig,
)


def check_environment(environ: Mapping[str, str]) -> None:
    """Log a warning of each `SPECWIRE_*` variable that no process reads; its value may be a secret."""
    known = known_variables(ALL_CONFIGS)
    for name in unknown_variables(ALL_CONFIGS, environ):
        near = did_you_mean(name, known)
        log.warning("environment variable %s is not known, and has no effect%s", name, near)
