"""The metrics of a draft that learns; all are 0 for one that does not."""

from __future__ import annotations

from specwire.core import Learning
from specwire.telemetry.metrics import Counter, Gauge, Metric

TABLE: tuple[Metric[Learning], ...] = (
    Counter(
        "specwire_learn_steps_total",
        "Steps of a draft that learns while it serves (--learn).",
        lambda now: now.num_steps,
    ),
    Counter(
        "specwire_learn_judged_tokens_total",
        "Tokens of the target that the draft was tested on before it learnt from them.",
        lambda now: now.num_judged_tokens,
    ),
    Counter(
        "specwire_learn_decisions_total",
        "How often what was learnt replaced the served weights, or was given up as worse.",
        lambda now: {("replace",): now.num_versions, ("go back",): now.num_rollbacks},
        ("decision",),
    ),
    Gauge(
        "specwire_learn_agreement",
        "Probability that the draft's token is the target's: first, and with the weights that serve now.",
        lambda now: {("first",): now.first_agreement, ("now",): now.agreement},
        ("weights",),
    ),
)
