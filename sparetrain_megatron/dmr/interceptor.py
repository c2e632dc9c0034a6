"""Sees every operator of the step and has it executed as its class and the engine's state ask.

A :class:`torch.utils._python_dispatch.TorchDispatchMode`: below autograd, so forward, recompute,
backward (on autograd's threads too), gradient accumulation, clipping and the optimizer all pass
through it, whatever module or function they come from.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import naive
from .operators import RUN_ONCE, Kind, Operator, describe
from .second_device import Call

if TYPE_CHECKING:
    from .engine import Engine

_clock = time.perf_counter
_no_torch_function = torch._C.DisableTorchFunction


class Interceptor(TorchDispatchMode):
    """The dispatch mode of one engine.

    Attributes:
        enabled: While False everything passes through untouched.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.enabled = True
        self._engine = engine
        self._handlers = {
            Kind.PURE: self._computing,
            Kind.MUTATING: self._computing,
            Kind.SCALAR: self._scalar,
            Kind.COLLECTIVE: self._collective,
            Kind.UNKNOWN: self._unknown,
        }

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under this mode; see ``compiled.py``."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        operator = describe(func)
        # A function mode above us has done its work; it must not see our own calls.
        with _no_torch_function():
            if operator.kind in RUN_ONCE:
                engine = self._engine
                counts = engine.statistics.run_once
                name = operator.kind.value
                counts[name] = counts.get(name, 0) + 1
                return func(*args, **kwargs)
            return self._handlers[operator.kind](operator, func, args, kwargs)

    def _computing(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        if not naive.comparable(args, kwargs):
            return self._unknown(operator, func, args, kwargs)
        mutating = operator.kind is Kind.MUTATING
        position = engine.position
        accumulates = mutating and engine.is_accumulator(operator, args, kwargs)
        if accumulates:
            phase, position.phase = position.phase, "accumulate"
        try:
            if engine.passes:
                return self._observed(operator, func, args, kwargs)
            run = naive.mutating if mutating else naive.pure
            return run(engine, operator, func, args, kwargs)
        finally:
            if accumulates:
                position.phase = phase

    def _observed(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs once under piggyback and leaves, or compares, fingerprints of what it produced."""
        engine = self._engine
        running, injector = engine.passes[-1], engine.injector
        written = operator.written_tensors(args, kwargs)
        # A wrong index would crash the operators that follow, before any recompute.
        at_once = running.method == "piggyback"
        if at_once and written and not all(map(naive.real, written)):
            output = naive.mutating(engine, operator, func, args, kwargs)
            produced = naive.results(operator, output, written)
        else:
            state = None
            if at_once and operator.random:
                state = naive.generator_of(args, kwargs).get_state()
            output = func(*args, **kwargs)
            produced = naive.results(operator, output, written)
            if not all(map(naive.plain, produced)):
                engine.unprotected(operator.name)
                return output
            if injector.armed:
                injector.visit(engine.position, operator.name, running.execution, produced)
            if at_once and not written and not all(map(naive.real, produced)):
                naive.check_pure(engine, operator, func, args, kwargs, output, state)
        start = _clock()
        again = None if written or operator.random else Call(func, args, kwargs)
        engine.observe(operator.name, produced, again)
        if again is not None and engine.second_device.sampling:
            engine.second_device.sample(engine, operator, again, produced)
        if running.second:
            engine.count(running.method, operator, _clock() - start)
        else:
            engine.statistics.seconds_in_checks += _clock() - start
        return output

    def _scalar(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        return naive.scalar(engine, operator, func, args, kwargs)

    def _collective(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        return engine.collectives.run(operator, func, args, kwargs)

    def _unknown(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        self._engine.unprotected(operator.name)
        return func(*args, **kwargs)
