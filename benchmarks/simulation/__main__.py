"""`python -m benchmarks.simulation validate | controller | plan | report`; results in benchmarks/results."""

from __future__ import annotations

import argparse
import sys

from benchmarks.simulation import controller, planning, report, validation, writing
from benchmarks.simulation.planning import Planned


def main(argv: list[str] | None = None) -> int:
    """Run one part; its results replace those of the last time, and the report is written anew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("part", choices=["validate", "controller", "plan", "whole", "report"])
    parser.add_argument("--passes", type=int, default=2, help="over the grid in the running system")
    parser.add_argument("--tokens", type=int, default=1600, help="counted of each stream of `controller`")
    parser.add_argument("--keep-fixed", action="store_true", help="fixed lengths as they were the last time")
    studies = sorted({study for study, _ in planning.studies()})
    parser.add_argument("--study", choices=studies, help="of `plan`, this one only; the others stay")
    args = parser.parse_args(argv)
    if args.part == "validate":
        compared = validation.compare(validation.GRIDS, validation.wait_until_quiet, args.passes, _say)
        report.save("validation", compared)
    elif args.part == "controller" and args.keep_fixed:
        num_tokens = {False: args.tokens, True: 3 * args.tokens}
        report.save("controller", controller.choose_again(writing.choices_so_far(), num_tokens, _say))
    elif args.part == "controller":
        grid = controller.explore(controller.STEADY, controller.RTTS_MS, args.tokens, _say)
        turns = controller.explore(controller.ALTERNATING, controller.RTTS_MS, 3 * args.tokens, _say)
        report.save("controller", grid + turns)
    elif args.part == "plan":
        report.save("planning", _plan(args.study, args.keep_fixed))
    elif args.part == "whole":
        report.save("whole", planning.plan(planning.whole(), {}, _say))
    writing.write()
    return 0


def _plan(study: str | None, keeps_fixed: bool) -> list[Planned]:
    so_far = writing.planned_so_far() if study or keeps_fixed else []
    known = {done.case: done.fixed for done in so_far} if keeps_fixed else {}
    wanted = [(name, case) for name, case in planning.studies() if study in (None, name)]
    found = planning.plan(wanted, known, _say)
    return [*found, *(done for done in so_far if study not in (None, done.study))]


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
