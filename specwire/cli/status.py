"""`specwire status`: what a coordinator serves and does, and whether its texts can be repeated."""

from __future__ import annotations

from specwire.client.client import Client
from specwire.config.client import ClientConfig


def show(settings: ClientConfig) -> str:
    """One fact a line.

    Raises:
        SpecwireError: the server does not answer.
    """
    with Client(settings.server, timeout_s=settings.timeout_s, **settings.credentials) as client:
        target, draft = client.get_model_info()
        status = client.get_status()
    why = target.why_not_reproducible
    lines = {
        "target": target.summary,
        "draft": status.draft_unavailable or (draft.summary if draft else "none"),
        "generations": f"{status.num_running} running, {status.num_waiting} waiting, "
        f"{status.num_finished} finished",
        "reproducible": f"false: {why}" if why else "true, at temperature 0 or under rule gumbel",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
