"""Puts faults into the outputs of operators while training runs.

The engine calls ``visit`` after every execution of a counted operator, but only while ``armed``
says that a fault can still come in this attempt: an iteration without faults pays one attribute.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from sparetrain_megatron.dmr.position import Position
from sparetrain_megatron.faults.corrupt import Place, corrupt, width
from sparetrain_megatron.faults.spec import FaultSpec


class Injector:
    """Injects the faults of one rank.

    Args:
        specs: What to inject; specs for other ranks are left out.
        rank: This process's global rank.

    Attributes:
        armed: Whether any spec can still hit in this attempt.
        records: One dictionary for each injected fault, in order: spec, iteration, attempt,
            microbatch, stage, rank, layer, phase, operator, execution, dtype, shape, output,
            element, bit, pattern, and effect (False when the pattern left every bit as it was).
    """

    def __init__(self, specs: Sequence[FaultSpec], rank: int) -> None:
        self.armed = False
        self.records: list[dict[str, Any]] = []
        self._rank = rank
        self._specs = [spec for spec in specs if spec.rank is None or spec.rank == rank]
        self._live: list[_Live] = []

    def begin(self, iteration: int, attempt: int) -> None:
        """Starts an attempt: counters start anew, and the specs that may hit in it are armed."""
        self._live = [
            _Live(spec, f"{spec.seed}/{self._rank}/{iteration}/{attempt}")
            for spec in self._specs
            if spec.hits_attempt(iteration, attempt)
        ]
        self.armed = bool(self._live)

    def visit(
        self,
        position: Position,
        operator: str,
        execution: str,
        tensors: Sequence[torch.Tensor],
    ) -> bool:
        """Corrupts what an operator wrote, in place and bit by bit, when a spec says so.

        Must be called outside of dispatch modes. The tensors may require grad, be views or
        inference tensors; their version counters don't move, as they wouldn't in a real fault.

        Args:
            position: Where the operator ran.
            operator: Its short name.
            execution: ``primary``, ``checker``, or ``only`` where an operator has one execution
                a phase; that one counts as either.
            tensors: What the operator returned or wrote.

        Returns:
            Whether any bit changed.
        """
        outputs = [tensor for tensor in tensors if tensor.numel() > 0]
        if not outputs:
            return False
        floating = [i for i, t in enumerate(outputs) if t.is_floating_point() or t.is_complex()]
        preferred = floating or range(len(outputs))

        def hit(live: _Live, generator: random.Random) -> bool:
            spec = live.spec
            if spec.random:
                index = generator.choice(preferred)
                size = outputs[index].numel()
                element = generator.randrange(size)
                bit = generator.randrange(width(outputs[index].dtype))
            else:
                index = preferred[0] if spec.output is None else spec.output % len(outputs)
                element, bit = spec.element, spec.bit
            output = outputs[index]
            place = corrupt(output, spec.pattern, element, bit)
            where = (str(output.dtype).removeprefix("torch."), list(output.shape), index)
            return self._record(live, position, operator, execution, where, place)

        return self._visit(position, operator, execution, hit)

    def visit_scalar(
        self, position: Position, operator: str, execution: str, value: bool | int | float
    ) -> bool | int | float:
        """As ``visit``, for an operator that returns a Python number; returns what to use."""
        result = value

        def hit(live: _Live, generator: random.Random) -> bool:
            nonlocal result
            bits = 1 if isinstance(value, bool) else 64
            bit = (generator.randrange(bits) if live.spec.random else live.spec.bit) % bits
            before, result = result, _corrupt_scalar(result, live.spec.pattern, bit)
            effect = not _same_number(before, result)
            where: tuple[str, list[int], int] = (type(value).__name__, [], 0)
            place = Place(0, bit, effect)
            return self._record(live, position, operator, execution, where, place)

        self._visit(position, operator, execution, hit)
        return result

    def _visit(
        self,
        position: Position,
        operator: str,
        execution: str,
        hit: Callable[[_Live, random.Random], bool],
    ) -> bool:
        changed = fired = False
        for live in self._live:
            if not live.matches(position, operator, execution):
                continue
            generator = live.count(position, execution)
            if generator is not None:
                fired = True
                changed |= hit(live, generator)
        if fired:
            self._live = [live for live in self._live if not live.spent]
            self.armed = bool(self._live)
        return changed

    def _record(
        self,
        live: _Live,
        position: Position,
        operator: str,
        execution: str,
        where: tuple[str, list[int], int],
        place: Place,
    ) -> bool:
        dtype, shape, output = where
        self.records.append(
            {
                "spec": str(live.spec),
                **asdict(position),
                "operator": operator,
                "execution": execution,
                "dtype": dtype,
                "shape": shape,
                "output": output,
                "element": place.element,
                "bit": place.bit,
                "pattern": live.spec.pattern,
                "effect": place.effect,
            }
        )
        return place.effect


class _Live:
    """A spec during one attempt: how many matching operators it has seen.

    A fault of both executions is counted in each by itself, since the order of primary and
    checker isn't fixed; and each has a generator in the same state, so that both draw alike.
    """

    def __init__(self, spec: FaultSpec, seed: str) -> None:
        self.spec = spec
        sides = ("primary", "checker") if spec.execution == "both" else (spec.execution,)
        self._seen = dict.fromkeys(sides, 0)
        self._generators = {side: random.Random(seed) for side in sides}

    def matches(self, position: Position, operator: str, execution: str) -> bool:
        spec = self.spec
        return (
            (spec.operator is None or spec.operator == operator)
            and (spec.phase is None or spec.phase == position.phase)
            and (spec.execution in (execution, "both") or execution == "only")
            and (spec.microbatch is None or spec.microbatch == position.microbatch)
            and (spec.layer is None or str(spec.layer) == str(position.layer))
        )

    def count(self, position: Position, execution: str) -> random.Random | None:
        """Counts a matching operator; returns the generator to draw from if it is to be hit."""
        side = self.spec.execution
        if side == "both":
            # The recompute is the second execution of an operator that runs once a phase.
            alone = "checker" if position.phase == "recompute" else "primary"
            side = alone if execution == "only" else execution
        self._seen[side] += 1
        generator = self._generators[side]
        if self.spec.random:
            return generator if generator.random() < (self.spec.rate or 0.0) else None
        return generator if self._seen[side] == self.spec.nth else None

    @property
    def spent(self) -> bool:
        """Whether this attempt can bring no further hit."""
        return not self.spec.random and all(n >= self.spec.nth for n in self._seen.values())


def _corrupt_scalar(value: Any, pattern: str, bit: int) -> Any:
    if pattern in ("swap", "shift"):
        return value  # a single element has no neighbour
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # Python integers know no width; ATen's are 64 bits wide.
        raw = (-value if pattern == "negate" else value ^ (1 << bit)) & (2**64 - 1)
        return raw - 2**64 if raw >> 63 else raw
    bit = 63 if pattern == "negate" else bit
    (raw,) = struct.unpack("<Q", struct.pack("<d", value))
    return struct.unpack("<d", struct.pack("<Q", raw ^ (1 << bit)))[0]


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b
