"""Runs an unmodified Megatron entry script with the protection attached.

    torchrun --nproc-per-node 2 -m sparetrain_megatron pretrain_gpt.py ARGS … --sparetrain

The script sees exactly the command line it would see without this package: our flags are taken
out, so nothing of ours ends up in Megatron's arguments or checkpoints. Everything that can be
wrong with the flags is found before torch is imported, and the CPU device, if asked for, is in
place before anything of Megatron is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparetrain_megatron import __version__
from sparetrain_megatron.config import SparetrainConfig, add_arguments, parse_command_line
from sparetrain_megatron.errors import EXIT_USAGE, SparetrainError, UsageError
from sparetrain_megatron.report.terminal import say

PROGRAM = "python -m sparetrain_megatron"


def main(argv: Sequence[str]) -> int:
    """Parses, attaches and runs; returns the exit code.

    Args:
        argv: The script, its arguments and our flags, in any order after the script.

    Raises:
        SystemExit: Whatever the script exits with.
        BaseException: Whatever else ends the script, except this package's own errors.
    """
    try:
        config, rest = parse_command_line(argv)
        if not rest or rest[0] in ("-h", "--help"):
            if _first_of("RANK"):
                print(_help(), end="", flush=True)
            return 0 if rest else EXIT_USAGE
        if rest[0] == "--version":
            print(f"sparetrain {__version__}")
            return 0
        if rest[0].startswith("-"):
            raise UsageError(f"{rest[0]} comes before the script; usage: {PROGRAM} SCRIPT ARGS …")
    except UsageError as error:
        # Every rank has the same command line, so one of them speaks for all.
        return _fail(error, speak=_first_of("RANK"))

    try:
        script = prepare(config, rest)
    except SparetrainError as error:
        # What is installed may differ between machines, so one rank of each speaks.
        return _fail(error, speak=_first_of("LOCAL_RANK"))

    try:
        runpy.run_path(script, run_name="__main__")
        if _uses_deepspeed(rest):
            from sparetrain_megatron import deepspeed

            deepspeed.finish()
    except SparetrainError as error:
        # One stage may be refused while the others are not: the rank that knows why says so.
        return _fail(error, speak=True, rank=os.environ.get("RANK"))
    return 0


def attach_to_script() -> None:
    """Does the same from inside of an entry script, which `patches/` has call this.

    It takes our flags out of `sys.argv`; to be called before anything of Megatron is imported.

    Raises:
        SystemExit: A flag is wrong, or something is refused; the reason has been printed.
    """
    try:
        config, rest = parse_command_line(sys.argv[1:])
    except UsageError as error:
        raise SystemExit(_fail(error, speak=_first_of("RANK"))) from None
    try:
        prepare(config, [sys.argv[0], *rest])
    except SparetrainError as error:
        raise SystemExit(_fail(error, speak=_first_of("LOCAL_RANK"))) from None

    # What is refused later ends as it would under `main`: with a line and its own exit code.
    hook = sys.excepthook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        if isinstance(error, SparetrainError):
            raise SystemExit(_fail(error, speak=True, rank=os.environ.get("RANK")))
        hook(kind, error, traceback)

    sys.excepthook = excepthook


def prepare(config: SparetrainConfig, command: Sequence[str]) -> str:
    """Makes this process ready for the script: `sys.argv`, `sys.path`, device, protection.

    Args:
        config: The configuration.
        command: The script and its own arguments.

    Returns:
        The script's path.

    Raises:
        UsageError: The script doesn't exist, Megatron is missing, or something is refused.
    """
    script = Path(command[0])
    if not script.is_file():
        raise UsageError(f"script {command[0]} doesn't exist")
    sys.argv = [str(script), *command[1:]]
    # As the interpreter does for a script, and before Megatron is looked for: a checkout of
    # Megatron-LM next to the script goes before an installed one.
    sys.path.insert(0, str(script.resolve().parent))

    if _uses_deepspeed(command):
        _prepare_deepspeed(config)
        return str(script)
    if config.enabled or config.cpu:
        _require_megatron()
    if config.cpu:
        from sparetrain_megatron import hostdevice

        try:
            hostdevice.install()
        except RuntimeError as error:
            raise UsageError(f"--sparetrain-cpu: {error}") from error
        hostdevice.prepare_megatron()
    if config.enabled:
        from sparetrain_megatron import megatron

        megatron.attach(config)
        if not config.cpu:
            _hint_without_gpu()
    return str(script)


def _uses_deepspeed(command: Sequence[str]) -> bool:
    """Whether a script is told to use DeepSpeed, by one of the flags of its users."""
    flags = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")
    return any(argument.split("=")[0] in flags for argument in command[1:])


def _prepare_deepspeed(config: SparetrainConfig) -> None:
    """Has the engines protected that the script is going to make.

    The block in DeepSpeed's configuration says how; `--sparetrain` with its flags goes before it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "DeepSpeed is not installed; install it with: "
            "pip install 'sparetrain-megatron[deepspeed]'"
        )
    if config.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    from sparetrain_megatron import deepspeed

    deepspeed.install(config if config.enabled else None, required=True)


def _require_megatron() -> None:
    try:
        found = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UsageError(
            "Megatron-Core is not installed here, nor is it next to the script; "
            "install it with: pip install 'sparetrain-megatron[megatron]'"
        )


def _hint_without_gpu() -> None:
    import torch

    if not torch.cuda.is_available() and _first_of("LOCAL_RANK"):
        say("warning: no CUDA device found; to run on the CPU, add --sparetrain-cpu")


def _fail(error: SparetrainError, *, speak: bool, rank: str | None = None) -> int:
    if speak:
        where = f"rank {rank}: " if rank is not None else ""
        say("\n".join(f"error: {where}{line}" for line in str(error).splitlines()))
    return error.exit_code


def _first_of(variable: str) -> bool:
    """Whether this process is the only one, or the first by torchrun's `variable`."""
    return os.environ.get(variable, "0") in ("", "0")


def _help() -> str:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} SCRIPT [SCRIPT'S ARGUMENTS …] [--sparetrain …]\n"
        "       torchrun … -m sparetrain_megatron SCRIPT [SCRIPT'S ARGUMENTS …] [--sparetrain …]",
        description="Runs a Megatron entry script, protected against silent data corruption. "
        "The script is not changed and does not see the flags below.",
        add_help=False,
    )
    add_arguments(parser)
    return parser.format_help()
