"""Watches a few iterations of one rank and makes a
:class:`~sparetrain_megatron.plan.profile.Profile`.

While it watches, the iterations are protected without any deferral. What it notes of an operator is
the time of its primary execution, what it read and who produced that, and what it wrote; of a
window, when it opened and how long the rank waited.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dmr.naive import results
from ..dmr.operators import Kind, Operator, ignores_first, tensors_of
from ..dmr.position import Position
from ..plan import profile as data
from . import host_costs

_clock = time.perf_counter

_STEP = Operator("step", Kind.MUTATING)
_PHASES = {"accumulate": "backward", "communication": "forward", "held": "recompute"}


@dataclasses.dataclass(slots=True)
class _Seen:
    """One operator as it ran once."""

    operator: Operator
    seconds: float
    check: float | None
    written: int
    held: int
    inputs: tuple[int, ...]
    overwrites: tuple[int, ...]
    mutating: bool
    integer: bool
    recomputed: bool


@dataclasses.dataclass(slots=True)
class _Region:
    """Consecutive operators of one microbatch, layer and phase."""

    microbatch: int | None
    layer: int | str | None
    phase: str
    operators: list[_Seen] = dataclasses.field(default_factory=list)
    externals: list[data.External] = dataclasses.field(default_factory=list)
    windows: list[tuple[int, str, str, float]] = dataclasses.field(default_factory=list)

    @property
    def shape(self) -> tuple:
        """What regions must have in common to be the same template."""
        return (
            self.phase,
            tuple((s.operator.name, s.written, s.inputs, s.overwrites) for s in self.operators),
            tuple(e.bytes for e in self.externals),
            tuple((after, kind, what) for after, kind, what, _ in self.windows),
        )


class _Timed:
    """An operator's function that notes how long its primary execution took."""

    def __init__(self, func: Any, args: tuple) -> None:
        self._func = func
        self._args = args
        self.seconds: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A checker on copies comes first where arguments are written.
        if self.seconds is not None or any(a is not b for a, b in zip(args, self._args)):
            return self._func(*args, **kwargs)
        start = _clock()
        output = self._func(*args, **kwargs)
        self.seconds = _clock() - start
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)


class Recorder:
    """Records iterations; the interceptor hands every operator to :meth:`watch`.

    Args:
        position: The engine's position, read at every operator.
        constants: Storages that are not held by deferral: parameters.
        in_block: Whether the present operator is in a checkpointed block's forward or recompute.
        beside: Whether it is one that is never deferred.
    """

    def __init__(
        self,
        position: Position,
        constants: set[int],
        in_block: Callable[[], bool],
        beside: Callable[[], bool] = lambda: False,
    ) -> None:
        self._in_block = in_block
        self._beside = beside
        self._position = position
        self._constants = constants
        self._iterations: list[list[_Region | tuple[str, str, float]]] = []
        self._seconds: list[float] = []
        self._steps: list[_Region | tuple[str, str, float]] = []
        self._waiting: list[tuple[str, str, float]] = []
        self._region: _Region | None = None
        self._previous: _Region | None = None
        self._producers: dict[int, tuple[_Region, int]] = {}
        self._empty: set[int] = set()
        self._weak: list[Any] = []
        self._local: dict[int, int] = {}
        self._window: tuple[str, str, float] | None = None

    # --- while an iteration runs -----------------------------------------------------------------

    def watch(
        self, handler: Callable[..., Any], operator: Operator, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Has an operator executed and notes it."""
        region = self._enter()
        if self._beside():
            return self._at_once(region, handler, operator, func, args, kwargs)
        written = operator.written_tensors(args, kwargs)
        reads = args[1:] if ignores_first(operator, kwargs) else args
        inputs, held = self._inputs(region, tensors_of(reads, kwargs))
        # The first to write an allocation is the one that produces it.
        first = bool(written) and all(t.untyped_storage()._cdata in self._empty for t in written)
        self._empty.difference_update(t.untyped_storage()._cdata for t in written)
        overwrites = tuple(
            value for t in written if (value := self._value(region, t, known_only=True)) is not None
        )
        # Gradient buffers and the like: memory that was there before the step.
        outside = {t.untyped_storage()._cdata for t in written} - self._producers.keys()
        outside = set() if first else outside
        timed = _Timed(func, args)
        start = _clock()
        output = handler(operator, timed, args, kwargs)
        whole = _clock() - start
        seconds = timed.seconds if timed.seconds is not None else whole
        produced = [t for t in results(operator, output, ()) if isinstance(t, torch.Tensor)]
        ordinal = len(region.operators)
        recomputed = self._in_block()
        collective = operator.kind is Kind.COLLECTIVE
        for tensor in produced:
            storage = tensor.untyped_storage()
            if storage._cdata not in outside:
                self._producers[storage._cdata] = (region, ordinal)
                self._weak.append(storage._weak_ref())
        size = sum(t.numel() * t.element_size() for t in (produced or written))
        integer = operator.kind is Kind.SCALAR or any(not t.is_floating_point() for t in produced)
        region.operators.append(
            _Seen(
                operator,
                seconds,
                None if recomputed or collective else whole - seconds,
                size,
                held,
                inputs,
                () if first else overwrites,
                operator.mutating and not first,
                integer,
                recomputed,
            )
        )
        return output

    def allocated(self, tensors: Sequence[torch.Tensor]) -> None:
        """Memory without a value, which an operator will write."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._empty.add(storage._cdata)
            self._weak.append(storage._weak_ref())

    def stepped(self, seconds: float, check: float) -> None:
        """The optimizer has stepped some parameters, twice.

        Args:
            seconds: Of the step itself.
            check: Of the second one, with the copies and the comparison.
        """
        self._enter().operators.append(
            _Seen(_STEP, seconds, check, 0, 0, (), (), True, False, False)
        )

    def _at_once(
        self,
        region: _Region,
        handler: Callable[..., Any],
        operator: Operator,
        func: Any,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Notes the time of an operator that is no part of the region's data flow."""
        timed = _Timed(func, args)
        start = _clock()
        output = handler(operator, timed, args, kwargs)
        whole = _clock() - start
        seconds = timed.seconds if timed.seconds is not None else whole
        writes = dataclasses.replace(operator, kind=Kind.MUTATING)
        if operator.kind is Kind.COLLECTIVE:
            writes = operator
        mutating, collective = writes.mutating, operator.kind is Kind.COLLECTIVE
        check = None if collective else whole - seconds
        region.operators.append(_Seen(writes, seconds, check, 0, 0, (), (), mutating, False, False))
        return output

    def window_opens(self, kind: str, name: str) -> None:
        """The rank begins to wait."""
        self._window = (kind, name, _clock())

    def window_closes(self) -> None:
        """The rank goes on."""
        if self._window is not None:
            kind, name, start = self._window
            what = _what(name, self._position.microbatch)
            self._waiting.append((kind, what, _clock() - start))
            self._window = None

    def iteration(self, seconds: float) -> None:
        """An iteration has ended and stands."""
        self._flush(None)
        self._iterations.append(self._steps)
        self._seconds.append(seconds)
        self.discard()

    def discard(self) -> None:
        """Forgets the present iteration."""
        self._steps, self._waiting = [], []
        self._region = self._previous = None
        self._producers.clear()
        self._empty.clear()
        for weak in self._weak:
            torch.UntypedStorage._free_weak_ref(weak)
        self._weak.clear()

    @property
    def iterations(self) -> int:
        return len(self._iterations)

    def _enter(self) -> _Region:
        position = self._position
        phase = _PHASES.get(position.phase, position.phase)
        if position.microbatch is None and position.phase in ("accumulate", "clip", "optimizer"):
            phase = position.phase
        region = self._region
        if (
            region is None
            or region.microbatch != position.microbatch
            or region.layer != position.layer
            or region.phase != phase
        ):
            region = _Region(position.microbatch, position.layer, phase)
            self._flush(region)
        elif self._waiting:
            region.windows += [(len(region.operators), *w) for w in self._waiting]
            self._waiting = []
        return region

    def _flush(self, region: _Region | None) -> None:
        self._steps += self._waiting
        self._waiting = []
        if region is not None:
            self._steps.append(region)
            self._previous, self._region = self._region, region
            self._local = {}

    def _inputs(
        self, region: _Region, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[int, ...], int]:
        inputs, held = [], {}
        for tensor in tensors:
            value = self._value(region, tensor)
            if value is not None:
                inputs.append(value)
                storage = tensor.untyped_storage()
                held[storage._cdata] = storage.nbytes()
        return tuple(dict.fromkeys(inputs)), sum(held.values())

    def _value(self, region: _Region, tensor: torch.Tensor, known_only: bool = False) -> int | None:
        """A value's number in the region: an operator's ordinal, or ~k for external value k."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._constants:
            return None
        producer = self._producers.get(key)
        if producer is not None and producer[0] is region:
            return producer[1]
        if known_only and producer is None:
            return None
        if key in self._local:
            return ~self._local[key]
        phase = value = None
        before = self._previous
        if (
            producer is not None
            and producer[0] is before
            and (before.microbatch, before.layer) == (region.microbatch, region.layer)
        ):
            phase, value = before.phase, producer[1]
        self._local[key] = len(region.externals)
        # Kept from being taken for another value, were its memory to be used again.
        self._weak.append(storage._weak_ref())
        region.externals.append(data.External(bytes=storage.nbytes(), phase=phase, value=value))
        return ~self._local[key]

    # --- afterwards ------------------------------------------------------------------------------

    def profile(
        self,
        identity: data.Identity,
        rank: int,
        stage: int,
        device: torch.device | None = None,
        binds: bool = True,
    ) -> data.Profile:
        """The profile: medians over the recorded iterations, and what recording costs here.

        Args:
            identity: What a plan made from it depends on.
            rank: This rank's number.
            stage: Its pipeline stage.
            device: What the costs are measured on; default: the CPU.
            binds: Whether blocks that run the same operators every time will be bound.

        Raises:
            ValueError: Nothing was recorded.
        """
        if not self._iterations:
            raise ValueError("no iteration has been recorded")
        # Iterations of the most common structure; one that was disturbed has another.
        shapes = [tuple(_shape(step) for step in steps) for steps in self._iterations]
        usual = max(set(shapes), key=shapes.count)
        kept = [steps for steps, shape in zip(self._iterations, shapes) if shape == usual]
        seconds = [s for s, shape in zip(self._seconds, shapes) if shape == usual]
        groups: dict[tuple, list[_Region]] = {}
        for steps in kept:
            for step in steps:
                if isinstance(step, _Region):
                    groups.setdefault(step.shape, []).append(step)
        numbers = {shape: number for number, shape in enumerate(groups)}
        templates = tuple(_template(regions) for regions in groups.values())
        runs: list[data.Run | data.Window] = []
        for i, step in enumerate(kept[0]):
            if isinstance(step, _Region):
                runs.append(
                    data.Run(
                        template=numbers[step.shape], microbatch=step.microbatch, layer=step.layer
                    )
                )
            else:
                times = [steps[i][2] for steps in kept]  # type: ignore[index]
                kind, what, _ = step
                runs.append(data.Window(kind=kind, what=what, **_middle(times)))
        costs = host_costs.measure(
            device or torch.device("cpu"), binds and _may_be_bound(templates)
        )
        return data.Profile(
            identity=identity,
            rank=rank,
            stage=stage,
            iterations=len(kept),
            spread=_middle(seconds)["spread"],
            templates=templates,
            steps=tuple(runs),
            costs=costs,
        )


def _may_be_bound(templates: Sequence[data.Template]) -> bool:
    """Whether blocks run the same every time; otherwise each has to be recorded."""
    for template in templates:
        if template.phase == "recompute" or template.name.startswith("backward"):
            block = template.phase == "recompute" or template.name.split()[-1].isdigit()
            if block and any(o.random or o.collective for o in template.operators):
                return False
    return True


def _shape(step: Any) -> tuple:
    return step.shape if isinstance(step, _Region) else step[:2]


def _what(name: str, microbatch: int | None) -> str:
    if name.startswith(("send", "recv", "p2p", "verdict")):
        return "pipeline"
    if microbatch is None:
        return "gather" if name == "all_gather" else "data"
    return "expert" if name == "all_to_all" else "tensor"


def _middle(times: Sequence[float]) -> dict[str, float]:
    """Median and distance between the quartiles."""
    if len(times) < 2:
        return {"seconds": times[0], "spread": 0.0}
    low, middle, high = statistics.quantiles(times, n=4)
    return {"seconds": max(middle, 0.0), "spread": max(high - low, 0.0)}


def _template(regions: Sequence[_Region]) -> data.Template:
    first = regions[0]
    operators = []
    for i, seen in enumerate(first.operators):
        times = [region.operators[i].seconds for region in regions]
        checks = [c for region in regions if (c := region.operators[i].check) is not None]
        operator = seen.operator
        operators.append(
            data.Operator(
                name=operator.name,
                **_middle(times),
                check=statistics.median(checks) if checks else None,
                written=seen.written,
                held=seen.held,
                inputs=seen.inputs,
                overwrites=seen.overwrites if seen.mutating else (),
                recomputed=seen.recomputed,
                mutating=seen.mutating,
                random=operator.random,
                integer=seen.integer,
                collective=operator.kind is Kind.COLLECTIVE,
            )
        )
    windows = []
    for i, (after, kind, what, _) in enumerate(first.windows):
        times = [region.windows[i][3] for region in regions]
        windows.append(data.InnerWindow(after=after, kind=kind, what=what, **_middle(times)))
    return data.Template(
        phase=first.phase,
        operators=tuple(operators),
        externals=tuple(first.externals),
        windows=tuple(windows),
        name=f"{first.phase} {first.layer}",
    )
