"""What fault to inject, and where: the value behind ``--sparetrain-inject``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from sparetrain_megatron.dmr.position import PHASES
from sparetrain_megatron.errors import UsageError

EXECUTIONS = ("primary", "checker", "both")
PATTERNS = ("bit", "swap", "shift", "burst", "negate")
REPEATS = ("once", "always")

# Keys that choose the place inside one output; a random fault draws them itself.
_PLACE_KEYS = ("nth", "element", "bit", "output")
_INTEGER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class FaultSpec:
    """One fault, or a random source of faults.

    A *fixed* spec names an iteration and hits the ``nth`` matching operator there, always in the
    same bit. A *random* one (``rate`` given) hits every matching operator with a probability,
    in a random element and bit, from a generator of its own: the same seed, the same faults.

    Attributes:
        iteration: Training iteration, from 1. A random spec without it hits in every iteration.
        rank: Global rank; None for every rank.
        microbatch: Index of the microbatch; None for any.
        layer: Number or name of the layer; None for any.
        phase: One of ``PHASES``; None for any.
        execution: ``primary``, ``checker``, or ``both``: a device that repeats its error.
        operator: Short name such as ``mm``; None for any.
        nth: Which of the matching operators, from 1, counted afresh in every attempt.
        element: Index into the flattened output; wraps around its size.
        bit: Bit of the element, 0 the least significant; wraps around its width.
        output: Which non-empty output of an operator that has several; wraps around their number.
            None takes the first floating-point one, or the first when there is none.
        pattern: ``bit`` flips one bit, ``swap`` exchanges two neighbouring elements, ``shift``
            rotates a row by one element, ``burst`` flips the bit in four consecutive elements,
            ``negate`` negates every element.
        attempt: First attempt of the iteration that is hit, from 1.
        repeat: ``once``; ``always``: this attempt and all later ones; or a number of attempts.
        rate: Probability that a random spec hits an operator, in [0, 1].
        seed: Seed of a random spec.

    Raises:
        UsageError: On a value that makes no sense, naming its key and what is allowed.
    """

    iteration: int | None = None
    rank: int | None = None
    microbatch: int | None = None
    layer: str | int | None = None
    phase: str | None = None
    execution: str = "primary"
    operator: str | None = None
    nth: int = 1
    element: int = 0
    bit: int = 0
    output: int | None = None
    pattern: str = "bit"
    attempt: int = 1
    repeat: str | int = "once"
    rate: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layer, str) and _INTEGER.fullmatch(self.layer):
            object.__setattr__(self, "layer", int(self.layer))
        self._check_values()
        if self.random:
            if self.rate is None or not 0.0 <= self.rate <= 1.0:
                raise _bad("rate", self.rate, "a probability between 0 and 1")
            for key in _PLACE_KEYS:
                if getattr(self, key) != _DEFAULTS[key]:
                    raise UsageError(f"fault spec: {key}= makes no sense in a random fault")
            if self.seed is None:
                object.__setattr__(self, "seed", 0)
        else:
            if self.iteration is None:
                raise UsageError("fault spec: iteration= is missing (1 is the first)")
            if self.seed is not None:
                raise UsageError("fault spec: seed= belongs to a random fault (random,rate=P)")

    def _check_values(self) -> None:
        for key, allowed in (
            ("phase", PHASES),
            ("execution", EXECUTIONS),
            ("pattern", PATTERNS),
        ):
            value = getattr(self, key)
            if value is not None and value not in allowed:
                raise _bad(key, value, "one of " + ", ".join(allowed))
        for key, lowest in (
            ("iteration", 1),
            ("nth", 1),
            ("attempt", 1),
            ("rank", 0),
            ("microbatch", 0),
        ):
            value = getattr(self, key)
            if value is not None and value < lowest:
                raise _bad(key, value, f"a number from {lowest}")
        if self.repeat not in REPEATS and not (isinstance(self.repeat, int) and self.repeat >= 1):
            raise _bad("repeat", self.repeat, "once, always, or a number from 1")
        for key in ("layer", "operator"):
            value = getattr(self, key)
            if isinstance(value, str) and (not value or "," in value or value != value.strip()):
                raise _bad(key, value, "a name without commas")

    @property
    def random(self) -> bool:
        """Whether this is a random source of faults rather than one fault."""
        return self.rate is not None

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Reads ``key=value,key=value`` or ``random,rate=P,seed=S``.

        Args:
            text: The spec as given to ``--sparetrain-inject``.

        Returns:
            The spec; ``FaultSpec.parse(str(spec)) == spec``.

        Raises:
            UsageError: Naming the wrong key or value and what is allowed.
        """
        values: dict[str, Any] = {}
        is_random = False
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key == "random" and not equals:
                is_random = True
                continue
            if key not in _DEFAULTS:
                raise UsageError(
                    f"fault spec {text!r}: unknown key {key!r}; "
                    f"allowed are {', '.join(_DEFAULTS)}, and the word random"
                )
            if not value:
                raise UsageError(f"fault spec {text!r}: {key} needs a value, as in {key}=...")
            if key in values:
                raise UsageError(f"fault spec {text!r}: {key} is given twice")
            values[key] = _convert(key, value)
        if is_random and "rate" not in values:
            raise UsageError(f"fault spec {text!r}: random needs rate=, a probability")
        if "rate" in values and not is_random:
            raise UsageError(f"fault spec {text!r}: rate= belongs to a random fault: random,rate=P")
        return cls(**values)

    def __str__(self) -> str:
        parts = ["random"] if self.random else []
        for key, default in _DEFAULTS.items():
            value = getattr(self, key)
            if value != default:
                parts.append(f"{key}={value}")
        return ",".join(parts)

    def hits_attempt(self, iteration: int, attempt: int) -> bool:
        """Whether this spec is live in an attempt of an iteration."""
        if self.iteration is not None and iteration != self.iteration:
            return False
        if self.repeat == "always":
            return attempt >= self.attempt
        count = 1 if self.repeat == "once" else int(self.repeat)
        return self.attempt <= attempt < self.attempt + count


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(FaultSpec)}
_TEXT_KEYS = ("phase", "execution", "operator", "pattern", "layer")


def _convert(key: str, value: str) -> Any:
    if key in _TEXT_KEYS or (key == "repeat" and value in REPEATS):
        return value
    if key == "rate":
        try:
            return float(value)
        except ValueError:
            raise _bad(key, value, "a probability between 0 and 1") from None
    if not _INTEGER.fullmatch(value):
        wanted = "once, always, or a number from 1" if key == "repeat" else "a whole number"
        raise _bad(key, value, wanted)
    return int(value)


def _bad(key: str, value: Any, allowed: str) -> UsageError:
    return UsageError(f"fault spec: {key}={value} is not allowed; it must be {allowed}")
