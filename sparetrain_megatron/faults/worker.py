"""A campaign's process for one configuration: runs faults one after the other.

Megatron's state is global to a process, so every configuration has one of its own; and a fault that
kills the process costs one fault. Results are lines of JSON, written to a file descriptor of their
own, since Megatron writes to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from sparetrain_megatron.faults.bench import Bench, Outcome, Setup, with_bench
from sparetrain_megatron.faults.injector import Injector
from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.faults.targets import Recorder, Target, Targets


@dataclass(frozen=True)
class Order:
    """What a worker is to do.

    Attributes:
        setup: The configuration.
        faults: How many faults there are.
        first: The first one to run: those before it have been run already.
        clean_steps: Steps without a fault, spread evenly between the faults.
        seed: Of the draw.
        patterns: Of the faults.
        directory: For files of the run.
    """

    setup: Setup
    faults: int
    first: int
    clean_steps: int
    seed: int
    patterns: tuple[str, ...]
    directory: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        values = json.loads(text)
        values["setup"] = Setup(**values["setup"])
        values["patterns"] = tuple(values["patterns"])
        return cls(**values)


def run(order: Order, tell: Any) -> None:
    """Runs the order.

    Args:
        order: What to do.
        tell: Called with each result, a dictionary of plain values; see :func:`_fault` and
            :func:`_clean`.
    """

    def use(bench: Bench) -> None:
        recorder = Recorder()
        bench.run(recorder)
        targets = Targets(recorder.visits, bench.iteration)
        drawn = targets.draw(order.faults, f"{order.seed}/{order.setup.name}", order.patterns)
        tell({"kind": "start", "executions": len(recorder.visits)})
        for number in range(order.first, order.faults):
            # Before the fault: a step without one also shows that the last one has left nothing.
            done, next_done = (order.clean_steps * n // order.faults for n in (number, number + 1))
            for _ in range(next_done - done):
                tell(_clean(bench))
            tell({"kind": "trying", "number": number, **asdict(drawn[number])})
            tell({"kind": "fault", "number": number, **_fault(bench, drawn[number])})
        if order.faults == 0:
            for _ in range(order.clean_steps):
                tell(_clean(bench))
        tell({"kind": "end"})

    with_bench(order.setup, order.directory, use)


def _clean(bench: Bench) -> dict[str, Any]:
    before = bench.operators_checked()
    outcome = bench.run(Injector([], 0))
    return {
        "kind": "clean",
        "checks": bench.operators_checked() - before,
        "alarms": _findings(outcome),
        "error": outcome.error,
        "differs": outcome.differs[:5],
    }


def _fault(bench: Bench, target: Target) -> dict[str, Any]:
    injector = Injector([FaultSpec.parse(target.spec)], 0)
    outcome = bench.run(injector)
    return {
        **asdict(target),
        "reached": bool(outcome.records),
        "effect": any(record["effect"] for record in outcome.records),
        "harmful": outcome.harmful,
        "differs": outcome.differs[:5],
        "reported": bool(outcome.mismatches),
        "findings": _findings(outcome),
        "error": outcome.error,
    }


def _findings(outcome: Outcome) -> list[str]:
    return [
        f"{m.position.phase} {m.operator} [{m.method}, {m.wrong}]" for m in outcome.mismatches[:5]
    ]


def main(argv: list[str]) -> None:
    """``worker.py FD ORDER``."""
    results = os.fdopen(int(argv[0]), "w", buffering=1)
    run(Order.from_json(argv[1]), lambda values: print(json.dumps(values), file=results))
    results.close()
    # Not through the interpreter's end, where threads of Megatron's may be waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
