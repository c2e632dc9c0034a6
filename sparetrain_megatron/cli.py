"""The command `sparetrain`: what can be done apart from a training run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from sparetrain_megatron import __version__
from sparetrain_megatron.doctor import commands as doctor
from sparetrain_megatron.errors import SparetrainError, UsageError
from sparetrain_megatron.plan import commands as planning
from sparetrain_megatron.report.overview import Overview
from sparetrain_megatron.report.terminal import PLAIN_WIDTH, render, say
from sparetrain_megatron.simulator import commands as simulating


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["campaign"]:
            # It has its own parser, which needs torch; the others should not wait for that.
            from sparetrain_megatron.faults import campaign

            return int(campaign.main(arguments[1:]) or 0)
        parser = _parser()
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return 0
        return _COMMANDS[args.command](args)
    except SparetrainError as error:
        say("\n".join(f"error: {line}" for line in str(error).splitlines()))
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparetrain",
        description="Training runs protected against silent data corruption. A run itself is "
        "started with: python -m sparetrain_megatron SCRIPT … --sparetrain",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparetrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "campaign", help="inject many faults into a real model and report which were found"
    )
    report = commands.add_parser(
        "report",
        help="show what a run found, from its events and summary",
        description="Shows mismatches, rollbacks and what was checked in a run.",
        allow_abbrev=False,
    )
    report.add_argument("directory", metavar="DIR", help="the run's --sparetrain-dir")
    report.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    report.add_argument("--html", metavar="FILE", help="write one self-contained HTML file, too")
    planning.add_parsers(commands)
    doctor.add_parser(commands)
    simulating.add_parser(commands)
    return parser


def _report(args: argparse.Namespace) -> int:
    try:
        overview = Overview.read(args.directory)
        if args.html:
            from sparetrain_megatron.report.html import write_html

            say(f"wrote {write_html(args.directory, args.html)}")
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(overview.to_dict(), indent=2))
    else:
        print(overview.render(**_terminal()), end="")
    return 0


def _plan(args: argparse.Namespace) -> int:
    return _print(planning.run_plan(args), args.json)


def _show(args: argparse.Namespace) -> int:
    return _print(planning.run_show(args), args.json)


def _doctor(args: argparse.Namespace) -> int:
    diagnosis = doctor.run_doctor(args)
    _print((diagnosis.tables(), diagnosis.to_dict()), args.json)
    return 0 if diagnosis.healthy else doctor.EXIT_FOUND


def _simulate(args: argparse.Namespace) -> int:
    return _print(simulating.run(args), args.json)


def _print(output: planning.Output, as_json: bool) -> int:
    tables, values = output
    print(json.dumps(values, indent=2) + "\n" if as_json else render(tables, **_terminal()), end="")
    return 0


def _terminal() -> dict[str, Any]:
    """Colours and columns of standard output."""
    console = Console()
    tty = console.is_terminal
    return {
        "color": tty and not console.no_color,
        "width": console.width if tty else PLAIN_WIDTH,
    }


_COMMANDS = {
    "report": _report,
    "plan": _plan,
    "show": _show,
    "doctor": _doctor,
    "simulate": _simulate,
}
