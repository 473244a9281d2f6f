"""How a target drafts for itself: all that is known of each method without loading it.

A further one is an `OwnMethod` and a flag here, and its code, which `verify_service/service.py` names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specwire.config.fields import AUTO
from specwire.config.flags import option

HEADS, LAYERS, MTP, DFLASH, EAGLE3 = "heads", "layers", "mtp", "dflash", "eagle3"
DRAFT_MODEL = "draft_model"
DIR = "DIR"


class OwnMethod(NamedTuple):
    """One of them, besides a draft model.

    Attributes:
        argument: what it takes, such as a directory of weights; empty for nothing.
        drafts_with: in the help of `--draft`.
        needs: in `specwire drafts`.
        lacks: what an emulated target has none of.
        has_trees: whether it drafts trees, too.
        may_be_invariant: whether it goes together with `--batch-invariant`.
        other_names: in a speculative config, vLLM's.
    """

    argument: str
    drafts_with: str
    needs: str
    lacks: str = "hidden states"
    has_trees: bool = False
    may_be_invariant: bool = True
    other_names: tuple[str, ...] = ()


OWN_METHODS = {
    HEADS: OwnMethod(
        DIR,
        "heads of the target",
        "heads of the target: --draft heads:DIR",
        has_trees=True,
        other_names=("medusa",),
    ),
    LAYERS: OwnMethod(
        "SKIP",
        "the target less some blocks",
        "blocks that the target can spare: --draft layers:SKIP, or layers:auto",
        lacks="layers",
    ),
    MTP: OwnMethod(
        "",
        "its layers for multi-token prediction",
        "a target whose checkpoint has layers for multi-token prediction: --draft mtp",
        may_be_invariant=False,
    ),
    DFLASH: OwnMethod(
        DIR,
        "a block drafter",
        "a block drafter of the target: --draft dflash:DIR",
        has_trees=True,
        may_be_invariant=False,
    ),
    EAGLE3: OwnMethod(
        DIR,
        "EAGLE-3",
        "an EAGLE-3 of the target: --draft eagle3:DIR, or DIR",
        has_trees=True,
        may_be_invariant=False,
    ),
}
"""By the source that their proposals name."""
OWN = {name: source for source, method in OWN_METHODS.items() for name in (source, *method.other_names)}
"""Their names, with these sources."""
OWN_HELP = ", ".join(
    f"{source}{':' * bool(method.argument)}{method.argument} with {method.drafts_with}"
    for source, method in OWN_METHODS.items()
)


class Own(NamedTuple):
    """What a target drafts with by itself.

    Attributes:
        source: one of OWN_METHODS, or DRAFT_MODEL; empty if it does not.
        argument: the directory or model, or what `--layers` takes; empty if it takes none.
    """

    source: str = ""
    argument: str = ""


def named_own(draft: str) -> Own:
    """What `--draft` names: `heads:DIR`, `layers:SKIP`, `mtp`, `dflash:DIR`, `eagle3:DIR` or the directory of
    an EAGLE-3 or a block drafter; nothing for another draft."""
    if recognised := _published(draft):
        return Own(recognised, draft)
    source, colon, argument = draft.partition(":")
    method = OWN_METHODS.get(source)
    is_own = method is not None and (method.argument != "") == (colon != "")
    return Own(source, argument) if is_own else Own()


def _published(directory: str) -> str:
    """The method that a directory's config names: z-lab has settings of DFlash there, speculators name the
    kind, others have one layer and a vocabulary of the draft's own. Empty if there is none."""
    try:
        config = json.loads((Path(directory or "-") / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    if not isinstance(config, dict):
        return ""
    kind = config.get("speculators_model_type")
    if config.get("dflash_config") or kind == DFLASH:
        return DFLASH
    is_flat = kind is None and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    return EAGLE3 if kind == EAGLE3 or is_flat else ""


@dataclass(frozen=True, kw_only=True)
class OwnFlags:
    """Flags of the verify service, of which one may be given. Each has the name of its source."""

    heads: str = option(
        "", "directory of draft heads of the model, as `specwire train-heads` makes them; empty for none"
    )
    layers: str = option(
        "",
        "blocks to draft without, such as a3,m3,m4 (attention and MLP of layer 3, MLP of layer 4), or a file "
        f"that `specwire search-layers` wrote; {AUTO} for that beside the model; empty not to draft",
    )
    mtp: bool = option(False, "let the model's own layers for multi-token prediction draft for it")
    dflash: str = option("", "directory of a block drafter (DFlash) of the model; empty for none")
    eagle3: str = option(
        "", "directory of an EAGLE-3 of the model, as SafeAILab or speculators save it; empty for none"
    )
    draft_model: str = option(
        "",
        "directory or hub id of a draft model that runs in this process, on the target's device; empty for "
        "none",
    )

    @property
    def given(self) -> list[Own]:
        """All that flags name."""
        values = {source: getattr(self, source) for source in (*OWN_METHODS, DRAFT_MODEL)}
        return [Own(source, "" if value is True else value) for source, value in values.items() if value]
