"""The commands `sparetrain plan` and `sparetrain show`."""

from __future__ import annotations

import argparse
from typing import Any

from sparetrain_megatron.config import parse_size
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.report.terminal import Titled

from . import show
from .files import read_kind
from .plan import Plan, load_plans, save_plans
from .planner import plan
from .profile import Profile

Output = tuple[list[Titled], dict[str, Any]]
"""Tables for people and the same as plain values."""


def add_parsers(commands: Any) -> None:
    """Adds both commands' flags to argparse's subparsers."""
    planning = commands.add_parser(
        "plan",
        help="plan from profiles what is checked where, and what it should cost",
        description="Plans which operators are checked where. Shows the plan; --out writes it.",
        allow_abbrev=False,
    )
    planning.add_argument(
        "profiles",
        metavar="PROFILE",
        nargs="+",
        help="profile.rank*.json; of a stage's ranks the lowest counts",
    )
    planning.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="bytes a device that deferred checks may hold, such as 4GiB, 10%% of the device's "
        "memory, or 0; default: what the profile leaves free",
    )
    planning.add_argument(
        "--mode",
        choices=("naive", "piggyback", "coarse", "full"),
        default="full",
        help="which methods may be used; default: full",
    )
    planning.add_argument(
        "--window-use",
        metavar="SHARE",
        type=float,
        default=0.9,
        help="share of each window to plan for; default: 0.9",
    )
    planning.add_argument("--out", metavar="FILE", help="write the plan here: plan.json")
    planning.add_argument("--json", action="store_true", help="one JSON object, no tables")
    showing = commands.add_parser(
        "show",
        help="show a plan or a profile",
        description="Shows a plan or a profile as tables.",
        allow_abbrev=False,
    )
    showing.add_argument("file", metavar="PLAN_OR_PROFILE")
    showing.add_argument("--json", action="store_true", help="one JSON object, no tables")


def run_plan(args: argparse.Namespace) -> Output:
    """`sparetrain plan`.

    Raises:
        UsageError: A file, or the budget, is not what it should be; or profiles of several jobs.
    """
    profiles = [Profile.load(path) for path in args.profiles]
    for path, profile in zip(args.profiles, profiles):
        differences = profile.identity.differences(profiles[0].identity)
        if differences:
            raise UsageError(
                f"{path}: is of another run than {args.profiles[0]}: " + "; ".join(differences)
            )
    plans: dict[int, Plan] = {}
    for stage, profile in show.lowest_ranks(profiles).items():
        budget = _budget(args.memory_budget, profile)
        plans[stage] = plan(profile, budget, args.mode, args.window_use)
    if args.out:
        save_plans(args.out, plans)
    return show.show_plans(plans), show.describe_plans(plans)


def _budget(text: str | None, profile: Profile) -> int | None:
    if text is None:
        return None
    if text.strip() == "0":
        return 0
    try:
        return parse_size(text, total=profile.memory.capacity or None)
    except ValueError as error:
        raise UsageError(f"--memory-budget: {error}, got {text!r}") from error


def run_show(args: argparse.Namespace) -> Output:
    """`sparetrain show`.

    Raises:
        UsageError: Neither a plan nor a profile, or not readable.
    """
    if read_kind(args.file) == "profile":
        profile = Profile.load(args.file)
        return show.show_profile(profile), show.describe_profile(profile)
    plans = load_plans(args.file)
    return show.show_plans(plans), show.describe_plans(plans)
