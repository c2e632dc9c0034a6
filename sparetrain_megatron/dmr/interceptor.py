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
from .foreign import Results
from .operators import Kind, Operator, describe, tensors_of
from .second_device import Call
from .tape import Tape

if TYPE_CHECKING:
    from .engine import Engine

_clock = time.perf_counter
_NO_KEYWORDS: dict[str, Any] = {}
_no_torch_function = torch._C.DisableTorchFunction
_no_dispatch = torch._C._disabled_torch_dispatch_impl
_INDICES = {torch.int8, torch.int16, torch.int32, torch.int64}
_PLAIN: set[type] = set()  # subclasses of Tensor that leave operators alone, such as Parameter


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
            Kind.PURE: self._pure,
            Kind.MUTATING: self._mutating,
            Kind.SCALAR: self._scalar,
            Kind.COLLECTIVE: self._collective,
            Kind.UNKNOWN: self._unknown,
        }

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under this mode; see ``compiled.py``."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper against dynamo around the handler: 3 µs an operator; see :class:`Guarded`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if not self.enabled:
            return func(*args, **kwargs)
        if types and not _PLAIN.issuperset(types):
            if any(t.__torch_dispatch__ is not _no_dispatch for t in types):
                # A tensor made of tensors: its own handler calls operators on those, which we see.
                return NotImplemented
            _PLAIN.update(types)
        operator = describe(func)
        # A function mode above us has done its work; it must not see our own calls.
        with _no_torch_function():
            if operator.runs_once:
                engine = self._engine
                engine.count_once(operator.kind_name)
                if engine.tape is not None and operator.kind is not Kind.VIEW:
                    return self._without_value(operator, func, args, kwargs)
                output = func(*args, **kwargs)
                if engine.observer is not None and operator.kind is Kind.UNINITIALISED:
                    engine.observer.allocated(tensors_of([output]))
                return output
            if operator.kind is Kind.COLLECTIVE and self._engine.collectives.stays(operator, args):
                self._engine.count_once("group of one")
                return func(*args, **kwargs)
            handler = self._handlers[operator.kind]
            if self._engine.observer is not None:
                return self._engine.observer.watch(handler, operator, func, args, kwargs)
            return handler(operator, func, args, kwargs)

    def _pure(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        if not naive.comparable(args, kwargs):
            return self._unknown(operator, func, args, kwargs)
        passes = engine.passes
        if engine.tape is not None and not (passes and not passes[-1].outputs_only):
            return self._recorded(engine.tape, operator, func, args, kwargs)
        if not passes:
            return naive.pure(engine, operator, func, args, kwargs)
        if passes[-1].outputs_only:
            return self._once(operator, func, args, kwargs)
        return self._observed(operator, func, args, kwargs)

    def _mutating(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        if not naive.comparable(args, kwargs):
            return self._unknown(operator, func, args, kwargs)
        if engine.deferred:
            engine.deferred.before_write(operator.written_tensors(args, kwargs))
        position = engine.position
        phase = position.phase
        if engine.is_accumulator(operator, args, kwargs):
            position.phase = "accumulate"
        try:
            if engine.passes and not engine.passes[-1].outputs_only:
                return self._observed(operator, func, args, kwargs)
            if engine.tape is not None:
                return self._written(engine.tape, operator, func, args, kwargs)
            if engine.passes:
                return self._once(operator, func, args, kwargs)
            return naive.mutating(engine, operator, func, args, kwargs)
        finally:
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
        if type(output) is Results and output.copies:
            # The other pass need not have made the copies: these are checked here.
            if again is not None:
                naive.check_pure(engine, operator, func, args, kwargs, output, None)
                again = Call(_Without(func, output.copies), args, kwargs)
            produced = produced[: -output.copies]
        engine.observe(operator.name, produced, again)
        if again is not None and engine.second_device.sampling:
            engine.second_device.sample(engine, operator, again, produced)
        if running.second:
            engine.count(running.method, operator, _clock() - start)
        else:
            engine.statistics.seconds_in_checks += _clock() - start
        return output

    def _once(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs once: what comes of it is compared at the end of the segment."""
        engine = self._engine
        output = func(*args, **kwargs)
        produced = naive.results(operator, output, operator.written_tensors(args, kwargs))
        if engine.injector.armed:
            engine.injector.visit(engine.position, operator.name, "only", produced)
        if operator.kind is Kind.PURE and _crashes_if_wrong(produced):
            naive.check_pure(engine, operator, func, args, kwargs, output, None)
        return output

    def _recorded(
        self, tape: Tape, operator: Operator, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Runs once and is recorded; executed again when the tape is replayed."""
        engine = self._engine
        start = _clock()
        state = naive.generator_of(args, kwargs).get_state() if operator.random else None
        encoded = tape.encode(args)
        named = {n: tape.encode(v) for n, v in kwargs.items()} if kwargs else _NO_KEYWORDS
        if engine.deferred.budget is not None and not engine.within_budget(tape):
            return naive.run(engine, operator, func, args, kwargs)
        between = _clock()
        output = func(*args, **kwargs)
        resumed = _clock()
        seconds = resumed - between
        if engine.injector.armed:
            produced = naive.results(operator, output, operator.written_tensors(args, kwargs))
            engine.injector.visit(engine.position, operator.name, "primary", produced)
        indices: list[torch.Tensor] = []
        if not (isinstance(output, torch.Tensor) and output.is_floating_point()):
            produced = naive.results(operator, output, operator.written_tensors(args, kwargs))
            if not operator.mutating and _crashes_if_wrong(produced):
                before = _clock()
                naive.check_pure(engine, operator, func, args, kwargs, output, state)
                resumed += _clock() - before  # has been counted
            indices = [t for t in produced if t.dtype in _INDICES]
        tape.record(operator, func, encoded, named, output, state, engine.position.phase, seconds)
        for tensor in indices:
            # Compared in the replay, too, before anything there uses it.
            tape.mark(tensor)
        engine.count("deferred", operator, between - start + _clock() - resumed)
        return output

    def _written(self, tape: Tape, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator that writes: recorded like others if it writes values of the tape alone."""
        engine = self._engine
        written = operator.written_tensors(args, kwargs)
        internal = [tape.is_internal(t) for t in written]
        if all(internal):
            return self._recorded(tape, operator, func, args, kwargs)
        if any(internal):
            # What it writes of the tape could not be produced by a replay of it.
            engine.cut_tape()
            assert engine.tape is not None
            tape = engine.tape
        # It writes outside of the tape: what it reads of the tape leaves it here.
        start = _clock()
        source = ("accumulate", written[0].data_ptr()) if len(written) == 1 else None
        for tensor in tensors_of(args, kwargs):
            tape.mark(tensor, source=source)
        for tensor in written:
            tape.forget(tensor)
        tape.bindable &= engine.position.phase == "accumulate"
        engine.statistics.seconds_in_checks += _clock() - start
        return naive.mutating(engine, operator, func, args, kwargs)

    def _without_value(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        """An allocation is recorded, for operators write into it; a changed storage ends a tape."""
        engine = self._engine
        tape = engine.tape
        assert tape is not None
        if operator.name in ("set_", "resize_", "resize_as_"):
            if any(tape.is_internal(t) for t in tensors_of(args, kwargs)):
                engine.cut_tape()
            return func(*args, **kwargs)
        if operator.kind is not Kind.UNINITIALISED:
            return func(*args, **kwargs)
        encoded = tape.encode(args)
        named = {n: tape.encode(v) for n, v in kwargs.items()} if kwargs else _NO_KEYWORDS
        output = func(*args, **kwargs)
        tape.record(operator, func, encoded, named, output, None, engine.position.phase)
        return output

    def _scalar(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        if engine.tape is not None:
            # A number steers the program: it is checked at once, its source when the tape is.
            for tensor in tensors_of(args, kwargs):
                engine.tape.bindable &= engine.tape.is_internal(tensor)
                engine.tape.mark(tensor)
        return naive.scalar(engine, operator, func, args, kwargs)

    def _collective(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        engine = self._engine
        engine.ordinal += 1
        if engine.collectives.arriving:
            engine.collectives.touch(operator, args, kwargs)
        engine.cut_tape()
        if engine.deferred:
            # Schemas of collectives declare no writes: every tensor argument may be one.
            engine.deferred.before_write(tensors_of(args, kwargs))
        return engine.collectives.run(operator, func, args, kwargs)

    def foreign(self, operator: Operator, func: Any, args: tuple) -> Any:
        """Executes, as the operator that it is, what isn't dispatched; see ``foreign.py``."""
        before, self.enabled = self.enabled, False
        try:
            with _no_torch_function(), torch.no_grad():
                return self._handlers[operator.kind](operator, func, args, {})
        finally:
            self.enabled = before

    def _unknown(self, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
        self._engine.unprotected(operator.name)
        return func(*args, **kwargs)


class Guarded(Interceptor):
    """For when something has been compiled: dynamo must not look into the handler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Without:
    """A foreign call without the copies among its results."""

    def __init__(self, func: Any, copies: int) -> None:
        self._func = func
        self._copies = copies

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self._func(*args)[: -self._copies])


def _crashes_if_wrong(produced: list[torch.Tensor]) -> bool:
    """Integers and masks: a wrong index or size would crash what follows before any replay."""
    return any(not (t.is_floating_point() or t.is_complex()) for t in produced)
