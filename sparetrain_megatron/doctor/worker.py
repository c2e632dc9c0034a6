"""One rank of a doctor's run: the user's script for a few iterations, then its findings.

    python -m sparetrain_megatron.doctor.worker DIRECTORY PROTECTED TIMED SCRIPT ARGS …

Iterations 1 … PROTECTED are executed with protection that only reports, the first of them with
every operator twice at once, the rest with the recompute as the forward's second execution; then
TIMED iterations without protection. Nothing is loaded or saved. Findings go to
DIRECTORY/doctor.rank<R>.json, mismatches to the events beside it.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import parse_command_line
from ..errors import EXIT_USAGE, SparetrainError
from ..launcher import prepare
from ..report.terminal import say


class Examination:
    """What one rank looks at.

    Args:
        protection: Attached already.
        directory: Where the findings go.
        protected, timed: Numbers of iterations.
    """

    def __init__(self, protection: Any, directory: Path, protected: int, timed: int) -> None:
        self.protection = protection
        self.path = directory / f"doctor.rank{protection.rank}.json"
        self.protected, self.timed = protected, timed
        self.findings: dict[str, Any] = {"refused": [], "unprotected": {}, "seconds": []}
        self.steps = 0

    def attach(self) -> None:
        """Stands around what the protection has put in place."""
        from megatron.training import training

        from ..megatron import training as adapter

        patches = self.protection.patches
        patches.replace(adapter, "check", self._check)
        for name, wrapper in (
            ("setup_model_and_optimizer", self._setup),
            ("train_step", self._train_step),
        ):
            original = getattr(training, name)
            patches.replace(training, name, functools.wraps(original)(wrapper(original)))

    def _check(self, args: Any, strict: bool) -> list[Any]:
        from ..megatron.preflight import REFUSALS

        found = [refusal for refusal in REFUSALS if refusal.applies(args)]
        self.findings["refused"] = [
            {"flag": r.flag, "why": r.why, "instead": r.instead, "hides": r.hides} for r in found
        ]
        self.findings["deterministic_mode"] = bool(getattr(args, "deterministic_mode", False))
        # A missing variable of the environment is what the examination is there to explain; a flag
        # may break it.
        if self.protected and any(r.flag.startswith("--") and not r.hides for r in found):
            self.end()
        return [refusal for refusal in found if refusal.hides]

    def _setup(self, original: Any) -> Any:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            settings = get_args()
            settings.save = settings.load = None
            return original(*args, **kwargs)

        return setup_model_and_optimizer

    def _train_step(self, original: Any) -> Any:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            import torch

            if self.steps == self.protected + self.timed:
                self.end()
            self.steps += 1
            self.protection.enabled = self.steps <= self.protected
            self.protection.engine.piggyback = self.steps > 1
            if self.protection.enabled:
                return original(*args, **kwargs)
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = original(*args, **kwargs)
            torch.cuda.synchronize()
            self.findings["seconds"].append(time.perf_counter() - start)
            return result

        return train_step

    def end(self) -> None:
        """Writes the findings and ends the process; every rank comes here in the same step.

        Raises:
            SystemExit: Always.
        """
        self.write()
        self.protection.end_in_bounded_time(0)
        raise SystemExit(0)

    def write(self) -> None:
        """Writes what is known by now."""
        statistics = self.protection.statistics
        self.protection.engine.flush_counts()
        unprotected = dict(statistics.unprotected)
        for refusal in self.findings["refused"]:  # named there
            unprotected.pop(refusal["flag"], None)
        self.findings |= {
            "unprotected": unprotected,
            "operators_checked": statistics.operators_checked,
            "steps": self.steps,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.findings) + "\n")


def main(argv: Sequence[str]) -> int:
    """Runs the script; returns the exit code."""
    directory, protected, timed = Path(argv[0]), int(argv[1]), int(argv[2])
    try:
        # Of the user's own settings of the protection only the device counts.
        given, command = parse_command_line(argv[3:])
        config = given.create(
            {
                "enabled": True,
                "cpu": given.cpu,
                "on_mismatch": "report",
                "strict": False,
                "second_device": 0,
                "dir": directory,
            }
        )
        script = prepare(given.create({"enabled": False, "cpu": given.cpu}), command)
        from .. import megatron

        examination = Examination(megatron.attach(config), directory, protected, timed)
        examination.attach()
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        # Again, or by now: the script's own flags may ask for fewer iterations.
        examination.write()
    except SparetrainError as error:
        say("\n".join(f"error: {line}" for line in str(error).splitlines()))
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    sys.exit(main(sys.argv[1:]))
