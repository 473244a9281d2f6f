"""The tools' commands of `specwire`: their flags, and what runs them, which imports what it needs."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from specwire.cli.process import end_on_signals
from specwire.config import extras
from specwire.config.link import ProxyConfig
from specwire.config.parser import add_command
from specwire.config.sampling_flags import add_sampling_flags, sampling_params
from specwire.config.stack import DemoConfig, TuneConfig
from specwire.engine import threads
from tools import drafts
from tools.bench import command as bench
from tools.timeline import command as timeline

add_bench, add_timeline = bench.add_command, timeline.add_command


def add_demo(commands: Any) -> None:
    about = "start everything, continue a prompt, show what happened"
    demo = add_command(commands, "demo", about, DemoConfig, _demo, has_file=True)
    demo.add_argument("prompt", nargs="?", help="text to continue (default: the start of a class)")
    omit = ("rule", "num_draft_tokens", "max_depth", "draft")
    add_sampling_flags(demo, omit=omit, max_tokens=192, temperature=0.7, seed=7)
    demo.add_argument("--json", action="store_true", help="print the completion as JSON")
    compare = "decode plainly and with each kind of draft in turn: chain, block, tree, ngram"
    demo.add_argument("--compare", action="store_true", help=compare)


def add_proxy(commands: Any) -> None:
    about = "add latency, jitter and a bandwidth limit between two services"
    add_command(commands, "proxy", about, ProxyConfig, _proxy)


def add_training(commands: Any) -> None:
    """Add what makes drafts of a target's own."""
    heads = partial(_make, "train-heads", drafts.train_heads)
    about = "train heads with which a target drafts for itself"
    add_command(commands, "train-heads", about, drafts.TrainHeadsConfig, heads)
    eagle3 = partial(_make, "train-eagle3", drafts.train_eagle3)
    about = "train an EAGLE-3 with which a target drafts for itself"
    add_command(commands, "train-eagle3", about, drafts.TrainEagle3Config, eagle3)
    layers = partial(_make, "search-layers", drafts.search_layers)
    about = "search for layers without which a target drafts for itself"
    add_command(commands, "search-layers", about, drafts.SearchLayersConfig, layers)


def add_tune(commands: Any) -> None:
    about = "measure a pair on a text, and say how it would be drafted with how many streams"
    tune = add_command(commands, "tune", about, TuneConfig, _tune)
    add_sampling_flags(tune, omit=("rule", "num_draft_tokens", "max_depth", "draft", "seed"), max_tokens=64)


def _tune(settings: TuneConfig, args: argparse.Namespace) -> int:
    from tools import tune

    end_on_signals()
    extras.require("specwire tune", "serve")
    return tune.run(settings, sampling_params(args))


def _demo(settings: DemoConfig, args: argparse.Namespace) -> int:
    from tools import demo

    end_on_signals()
    extras.require("specwire demo", "serve")
    params = sampling_params(args)
    return demo.run(settings, args.prompt, params, as_json=bool(args.json), compares=bool(args.compare))


def _proxy(config: ProxyConfig, _: argparse.Namespace) -> int:
    from specwire.rpc import process
    from tools.proxy import delay_proxy

    asyncio.run(process.run_until_signal(delay_proxy.serving(config)))
    return 0


def _make(name: str, making: Callable[[Any], None], config: Any, _: argparse.Namespace) -> int:
    extras.require(f"specwire {name}", "serve")
    threads.spin_briefly(os.environ)  # which torch reads when it is loaded
    end_on_signals()
    making(config)
    return 0
