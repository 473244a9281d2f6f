"""`specwire status`."""

from __future__ import annotations

import pytest

from specwire import Client
from specwire.cli import status
from specwire.config.client import ClientConfig
from specwire.config.link import Link
from specwire.errors import InternalError
from tests.support.harness import local_stack
from tests.support.processes import wait_until


def test_says_which_replica_is_not_available_and_why() -> None:
    with local_stack("emulated:step_ms=1", coordinator_options={}, verify_link=Link()) as stack:
        settings = ClientConfig(server=stack.address)
        name = f"verify at {stack.verify_proxy.address}: "  # type: ignore[union-attr]
        assert f"{name}0 streams, 0 of other coordinators; lost 0 times" in status.show(settings)
        stack.verify_proxy.stall()  # type: ignore[union-attr]
        wait_until(lambda: f"{name}not available: " in status.show(settings), 15.0)


def test_the_address_of_another_service() -> None:
    with (
        local_stack("emulated:step_ms=1") as stack,
        Client(stack.verify_address) as client,
        pytest.raises(InternalError, match="UNIMPLEMENTED: no such method; another service serves there"),
    ):
        client.get_status()
