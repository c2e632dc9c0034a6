"""What a campaign can hit: the operators of a step, and a stratified draw of faults among them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparetrain_megatron.dmr.position import PHASES, Position
from sparetrain_megatron.faults.corrupt import width
from sparetrain_megatron.faults.spec import FaultSpec

BIT_CLASSES = ("sign", "exponent", "mantissa", "integer")

_MANTISSA = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


def bits_of_class(dtype: torch.dtype, bit_class: str) -> range:
    """The bit positions of sign, exponent or mantissa; other types have one class, ``integer``."""
    bits = width(dtype)
    mantissa = _MANTISSA.get(dtype)
    if mantissa is None:
        return range(bits) if bit_class == "integer" else range(0)
    return {
        "sign": range(bits - 1, bits),
        "exponent": range(mantissa, bits - 1),
        "mantissa": range(mantissa),
    }.get(bit_class, range(0))


@dataclass(frozen=True, slots=True)
class Visit:
    """One execution of one operator in a step.

    Attributes:
        phase, layer, microbatch: Where it ran.
        operator: Its short name.
        execution: ``primary``, ``checker`` or ``only``.
        outputs: Dtype and number of elements of each non-empty output.
    """

    phase: str
    layer: str | int | None
    microbatch: int | None
    operator: str
    execution: str
    outputs: tuple[tuple[torch.dtype, int], ...]


class Recorder:
    """Stands in for an injector and notes what it could have hit."""

    def __init__(self) -> None:
        self.armed = True
        self.records: list[dict[str, Any]] = []
        self.visits: list[Visit] = []

    def begin(self, iteration: int, attempt: int) -> None:
        """An attempt starts."""

    def visit(
        self, position: Position, operator: str, execution: str, tensors: Sequence[torch.Tensor]
    ) -> bool:
        """Notes an operator; changes nothing."""
        outputs = tuple((t.dtype, t.numel()) for t in tensors if t.numel())
        if outputs:
            self._note(position, operator, execution, outputs)
        return False

    def visit_scalar(
        self, position: Position, operator: str, execution: str, value: bool | int | float
    ) -> bool | int | float:
        """Notes an operator that returns a number."""
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
        self._note(position, operator, execution, ((kinds[type(value)], 1),))
        return value

    def _note(self, position: Position, operator: str, execution: str, outputs: Any) -> None:
        self.visits.append(
            Visit(
                position.phase,
                position.layer,
                position.microbatch,
                operator,
                execution,
                outputs,
            )
        )


@dataclass(frozen=True, slots=True)
class Target:
    """One fault of a campaign.

    Attributes:
        spec: The fault, as ``--sparetrain-inject`` takes it.
        phase, operator: Its place, for the tables.
        dtype: Of the output that is hit.
        bit_class: One of ``BIT_CLASSES``, or the pattern where that is not ``bit``.
        side: ``primary`` or ``checker``.
    """

    spec: str
    phase: str
    operator: str
    dtype: str
    bit_class: str
    side: str


class Targets:
    """The faults that one step offers.

    Args:
        visits: From a :class:`Recorder`, in order.
        iteration: The iteration that the step will be repeated as.
    """

    def __init__(self, visits: Sequence[Visit], iteration: int) -> None:
        self._iteration = iteration
        self._by_operator: dict[str, list[Visit]] = defaultdict(list)
        self._cells: dict[tuple[str, str], dict[str, list[Visit]]] = {}
        for visit in visits:
            self._by_operator[visit.operator].append(visit)
            cell = self._cells.setdefault((visit.phase, visit.operator), defaultdict(list))
            for side in ("primary", "checker"):
                # The only execution of a forward is a primary, of a recompute a checker.
                only = "checker" if visit.phase == "recompute" else "primary"
                if visit.execution == side or (visit.execution == "only" and side == only):
                    cell[side].append(visit)

    def draw(self, count: int, seed: str, patterns: Sequence[str] = ("bit",)) -> list[Target]:
        """Draws faults, the same ones for the same seed.

        Phases take turns, and within a phase its operators. Sides (in each phase) and classes of
        bits are evened out as far as the operators allow; instance, output, element, bit and
        pattern are drawn at random.

        Args:
            count: How many.
            seed: Any text.
            patterns: Of the fault specs.
        """
        generator = random.Random(seed)
        cells = self._turns(generator)
        used: Counter[tuple[str, ...]] = Counter()

        def rarest(candidates: Sequence[str], *among: str) -> str:
            least = min(used[*among, c] for c in candidates)
            chosen = generator.choice([c for c in candidates if used[*among, c] == least])
            used[*among, chosen] += 1
            return chosen

        drawn = []
        for _ in range(count):
            phase, operator = next(cells)
            sides = self._cells[phase, operator]
            side = rarest([s for s in ("primary", "checker") if sides[s]], phase)
            visit = generator.choice(sides[side])
            output = generator.randrange(len(visit.outputs))
            dtype, elements = visit.outputs[output]
            pattern = generator.choice(patterns)
            bit_class = rarest([c for c in BIT_CLASSES if bits_of_class(dtype, c)])
            spec = FaultSpec(
                iteration=self._iteration,
                microbatch=visit.microbatch,
                layer=visit.layer,
                phase=phase,
                execution=side,
                operator=operator,
                nth=self._nth(visit, side),
                element=generator.randrange(elements),
                bit=generator.choice(bits_of_class(dtype, bit_class)),
                output=output,
                pattern=pattern,
            )
            name = str(dtype).removeprefix("torch.")
            shown = bit_class if pattern == "bit" else pattern
            drawn.append(Target(str(spec), phase, operator, name, shown, side))
        return drawn

    def _turns(self, generator: random.Random) -> Iterator[tuple[str, str]]:
        operators = {
            phase: sorted(operator for p, operator in self._cells if p == phase) for phase in PHASES
        }
        operators = {phase: names for phase, names in operators.items() if names}
        for names in operators.values():
            generator.shuffle(names)
        place = 0
        while True:
            for phase, names in operators.items():
                yield phase, names[place % len(names)]
            place += 1

    def _nth(self, wanted: Visit, side: str) -> int:
        """How many visits a spec for this one matches until it is reached, itself included.

        A spec leaves out what is None here, and then matches any layer or microbatch.
        """
        nth = 0
        for visit in self._by_operator[wanted.operator]:
            nth += (
                visit.phase == wanted.phase
                and visit.execution in (side, "only")
                and wanted.layer in (None, visit.layer)
                and wanted.microbatch in (None, visit.microbatch)
            )
            if visit is wanted:
                return nth
        raise AssertionError(wanted)
