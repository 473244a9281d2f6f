"""`python -m benchmarks.simulation`: the chosen draft length beside fixed ones, in simulated time."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import RESULTS, Report, machine, say
from benchmarks.simulation import controller


def main(argv: list[str] | None = None) -> int:
    """Simulate, print the table, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1600, help="counted of each stream")
    parser.add_argument("--alphas", type=float, nargs="+", default=controller.ALPHAS, help="of steady texts")
    parser.add_argument("--rtts-ms", type=float, nargs="+", default=controller.RTTS_MS, help="to the draft")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(argv)
    facts = machine()
    steady = [controller.Text(alpha=alpha) for alpha in args.alphas]
    of_steady, of_alternating = (
        [controller.Point(text=text, rtt_ms=rtt_ms) for text in texts for rtt_ms in args.rtts_ms]
        for texts in (steady, controller.ALTERNATING)
    )
    found = controller.explore([*controller.SHARED, *of_steady], args.tokens, say)
    found += controller.explore(of_alternating, 3 * args.tokens, say)
    return Report(
        name="controller",
        title="The adaptive length in simulated time",
        command="python -m benchmarks.simulation",
        machine=facts,
        about=(
            "Tokens/s of all streams. On a shared device passes of draft and target that run at once take "
            "twice as long. The adaptive length is counted once it has seen twice as many tokens as "
            f"are counted ({args.tokens}, on the alternating text {3 * args.tokens}); *while it learnt*: "
            "over plain decoding, in the first of these."
        ),
        bars=controller.bars(found),
        details=controller.details(found),
        data={"choices": [asdict(each) for each in found]},
    ).finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
