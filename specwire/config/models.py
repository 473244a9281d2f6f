"""Names of models and drafts: their flags' help, and checks that services and stacks share.

Every check raises ConfigError, naming the flag and its value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from specwire.config.blocks import check_layers
from specwire.config.fields import AUTO, check
from specwire.config.flags import did_you_mean, flag_name
from specwire.config.own_methods import DRAFT_MODEL, LAYERS, OWN, OWN_METHODS, Own, named_own
from specwire.config.speculative import ABOVE, INNER_METHODS, METHODS
from specwire.core import MAX_ADAPTER_LEN, Rule
from specwire.errors import ConfigError

EMBEDDED = "embedded"
EMULATED = "emulated:"
NO_DRAFT = "none"
VLLM = "vllm"
DTYPES = ("auto", "float32", "bfloat16", "float16")
RULES = (AUTO, *(rule.value for rule in Rule))
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a LoRA adapter, as peft writes them."""
MAX_ADAPTERS = 64
_ADAPTERS = "lora_modules"
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_inner(name: str, inner: str, model: str, num_devices: int) -> None:
    """Refuse what cannot guess the tokens of a draft."""
    both = f"{inner}{ABOVE}{model}"
    check(ABOVE not in inner + model, name, both, "has more than one inner drafter")
    check(is_model(model), name, both, f"{model} is no draft model, whose tokens could be guessed")
    known = inner in INNER_METHODS or (is_model(inner) and not inner.startswith(EMULATED))
    check(known, name, both, f"{inner} is none of {', '.join(INNER_METHODS)}, and no model")
    if inner not in INNER_METHODS:
        check_model(name, inner)
        check(not model.startswith(EMULATED), name, both, f"{model} has no tokenizer to compare")
    check(num_devices == 1, name, both, "is served on one device only")


def is_model(draft: str) -> bool:
    """Whether it names a model, and no method."""
    return draft not in ("", *METHODS, NO_DRAFT, *OWN) and not named_own(draft).source


def check_own(name: str, value: object, own: Own, target: str, num_devices: int) -> None:
    """Refuse a target that cannot draft for itself in this way, which the flag of that name says."""
    of_model = own.source == DRAFT_MODEL
    lacks = "device that a draft model could share" if of_model else OWN_METHODS[own.source].lacks
    check(not target.startswith(EMULATED), name, value, f"{target} has no {lacks}")
    check(num_devices == 1 or not of_model, name, value, "is served with --tensor-parallel-size 1 only")
    if own.source == LAYERS:
        check_layers(name, own.argument)
    if of_model:
        check_model(name, own.argument)
        kind = named_own(own.argument).source
        check(not kind, name, value, f"is no draft model: see the verify service's flag --{kind}")
        check(not own.argument.startswith(EMULATED), name, value, "is emulated; give it a service of its own")


def adapter_directories(given: str) -> dict[str, Path]:
    """Directories by the names of adapters, of `NAME=DIR,NAME=DIR` or a JSON object."""
    if given.startswith("{"):  # a mapping of a file of flags
        try:
            pairs = [(str(name), str(path)) for name, path in json.loads(given).items()]
        except (ValueError, RecursionError):
            raise ConfigError(f"{flag_name(_ADAPTERS)} {given}: is neither NAME=DIR nor JSON") from None
    else:
        entries = [entry.strip() for entry in given.split(",") if entry.strip()]
        for entry in entries:
            check("=" in entry, _ADAPTERS, entry, "is not NAME=DIR")
        pairs = [(entry.partition("=")[0], entry.partition("=")[2]) for entry in entries]
    directories: dict[str, Path] = {}
    for name, path in pairs:
        entry = f"{name}={path}"
        check(
            0 < len(name) <= MAX_ADAPTER_LEN, _ADAPTERS, entry, f"needs a name, of at most {MAX_ADAPTER_LEN}"
        )
        check(name not in directories, _ADAPTERS, entry, "has a name that is given twice")
        directories[name] = Path(path)
    check(len(directories) <= MAX_ADAPTERS, _ADAPTERS, len(directories), f"are over {MAX_ADAPTERS} adapters")
    return directories


def check_adapters(given: str, target: str, num_devices: int) -> None:
    """Refuse adapters that are not there, or that a target cannot have."""
    for name, directory in adapter_directories(given).items():
        entry = f"{name}={directory}"
        check(directory.is_dir(), _ADAPTERS, entry, "no such directory")
        is_apart = name not in (target, Path(target).name)
        check(is_apart, _ADAPTERS, entry, "has the name of the model itself")
    check(not given or num_devices == 1, _ADAPTERS, given, "are served with --tensor-parallel-size 1 only")
    check(not given or not target.startswith(EMULATED), _ADAPTERS, given, f"{target} has no weights")


def check_share(name: str, share: float) -> None:
    """A share in (0, 1]."""
    check(0 < share <= 1, name, share, "must lie in (0, 1]")


def check_model(name: str, source: str, others: Iterable[str] = ()) -> None:
    """A model directory, or a possible hub id, which is resolved by the preflight.

    Args:
        others: what the flag may name instead; a near miss of these is no hub id.
    """
    if source == EMBEDDED or source.startswith(EMULATED) or (source and Path(source).is_dir()):
        return
    near = did_you_mean(source, (EMBEDDED, EMULATED, *others))
    is_hub_id = not Path(source).exists() and _HUB_ID.fullmatch(source) is not None
    check(is_hub_id and not near, name, source, f"no such model directory{near}")


def check_device(name: str, device: str) -> None:
    """A device by torch's name."""
    check(_DEVICE.fullmatch(device) is not None, name, device, "is neither cpu nor cuda nor cuda:N")
