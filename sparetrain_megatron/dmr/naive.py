"""Naive DMR: the checker runs right beside the primary and the results are compared at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import bits
from .fingerprint import fingerprint
from .mismatch import Mismatch
from .operators import Kind, Operator, tensors_of
from .second_device import Call
from .second_device import digest_of as _digest
from .slices import Slice, cut, cut_one

if TYPE_CHECKING:
    from .engine import Engine

_clock = time.perf_counter

_GRAPH = Operator("compiled", Kind.COMPILED)
_CACHE = 512 << 10  # bytes of a slice that stays in a core's cache
# The same arithmetic with the result elsewhere: no copy has to be made first.
_OUT_OF_PLACE = {torch.ops.aten.add_.Tensor: torch.ops.aten.add.out}
# In-place operators whose result does not depend on what was there before.
_OVERWRITES = {"copy_", "zero_", "fill_"}


def comparable(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether all tensor arguments are plain strided memory."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not plain(value):
                return False
        elif isinstance(value, (list, tuple)):
            if not all(plain(t) for t in value if isinstance(t, torch.Tensor)):
                return False
    return True


def plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain strided memory, which can be compared bit for bit."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def results(operator: Operator, output: Any, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors an operator wrote, then the fresh ones it returned, undefined ones left out."""
    if isinstance(output, torch.Tensor):
        if not written:
            return [output]
        if any(output is t for t in written):
            return list(written)
        return [*written, output]
    if output is None:
        return list(written)
    skip = operator.undefined_outputs
    fresh = [
        t
        for i, value in enumerate(output if isinstance(output, (tuple, list)) else (output,))
        if i not in skip
        for t in tensors_of(value)
        if not any(t is w for w in written)
    ]
    return [*written, *fresh]


def generator_of(args: tuple, kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random operator draws from."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    tensors = tensors_of(args, kwargs)
    if device is None and tensors:
        device = tensors[0].device
    if device is not None and torch.device(device).type == "cuda":
        index = torch.device(device).index
        return torch.cuda.default_generators[
            torch.cuda.current_device() if index is None else index
        ]
    return torch.default_generator


def run(engine: Engine, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs an operator that computes twice, as its class asks."""
    execute = mutating if operator.kind is Kind.MUTATING else pure
    return execute(engine, operator, func, args, kwargs)


def pure(engine: Engine, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs an operator without side effects twice; returns the primary's result."""
    state = None
    if operator.random:
        state = generator_of(args, kwargs).get_state()
    output = func(*args, **kwargs)
    if engine.injector.armed:
        engine.injector.visit(
            engine.position, operator.name, "primary", results(operator, output, ())
        )
    check_pure(engine, operator, func, args, kwargs, output, state)
    return output


def check_pure(
    engine: Engine,
    operator: Operator,
    func: Any,
    args: tuple,
    kwargs: dict,
    output: Any,
    state: torch.Tensor | None,
) -> None:
    """The second execution of an operator that has just run, and the comparison.

    Args:
        output: The primary's result.
        state: The generator's state before the primary, for a random operator; the generator is
            left as the primary left it.
    """
    start = _clock()
    first_results = results(operator, output, ())
    if not all(map(plain, first_results)):
        engine.unprotected(operator.name)
        return

    def again() -> Any:
        if state is None:
            return func(*args, **kwargs)
        generator = generator_of(args, kwargs)
        end = generator.get_state()
        generator.set_state(state)
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(end)

    second = again()
    second_results = results(operator, second, ())
    if engine.injector.armed:
        engine.injector.visit(engine.position, operator.name, "checker", second_results)

    def suspect(mismatch: Mismatch) -> None:
        engine.second_device.suspect(
            mismatch, Call(func, args, kwargs), _digest(first_results), _digest(second_results)
        )

    _compare(
        engine,
        operator,
        first_results,
        second_results,
        lambda: results(operator, again(), ()),
        suspect,
    )
    if engine.second_device.sampling:
        engine.second_device.sample(engine, operator, Call(func, args, kwargs), first_results)
    engine.count("naive", operator, _clock() - start)


def mutating(engine: Engine, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs an operator that writes its arguments: the checker first, on copies of these."""
    written = operator.written_tensors(args, kwargs)
    limit = engine.copy_limit
    if operator.elementwise and not engine.injector.armed and _is_large(args[0]):
        slices = cut_one(args, kwargs, args[0], _CACHE)
        if slices is not None:
            return _in_cache(engine, operator, func, args, slices)
    if limit and sum(t.numel() * t.element_size() for t in written) > limit:
        slices = cut(operator, args, kwargs, written, limit)
        if slices is not None:
            return _mutating_in_slices(engine, operator, func, args, kwargs, written, slices)
    start = _clock()
    generator = generator_of(args, kwargs) if operator.random else None
    state = None if generator is None else generator.get_state()
    copies: dict[int, torch.Tensor] = {}
    checker_args, checker_kwargs = _with_copies(operator, args, kwargs, copies)
    spares: dict[int, torch.Tensor] = {}
    if not operator.random and any(_repaired(engine, t) for t in written):
        third_args, third_kwargs = _with_copies(operator, args, kwargs, spares)
    second = func(*checker_args, **checker_kwargs)
    second_written = [copies[id(t)] for t in written]
    second_results = results(operator, second, second_written)
    if engine.injector.armed:
        engine.injector.visit(engine.position, operator.name, "checker", second_results)
    if generator is not None and state is not None:
        generator.set_state(state)
    between = _clock()
    output = func(*args, **kwargs)
    first_results = results(operator, output, written)
    if engine.injector.armed:
        engine.injector.visit(engine.position, operator.name, "primary", first_results)
    resumed = _clock()

    def again() -> list[torch.Tensor]:
        if spares:
            output = func(*third_args, **third_kwargs)
            return results(operator, output, [spares[id(t)] for t in written])
        target = bits.clone_span(written[0])
        func(target, *args[1:], **kwargs)
        return [target]

    overwrites = operator.name in _OVERWRITES and len(written) == 1
    third = again if spares or overwrites else None
    _compare(engine, operator, first_results, second_results, third)
    engine.count("naive", operator, between - start + _clock() - resumed)
    return output


def graph(engine: Engine, name: str, call: Any) -> list[torch.Tensor]:
    """Runs a compiled graph twice; returns the primary's results."""
    first = call()
    start = _clock()
    second = call()
    if engine.injector.armed:
        engine.injector.visit(engine.position, name, "primary", first)
        engine.injector.visit(engine.position, name, "checker", second)
    for primary, checker in zip(first, second, strict=True):
        equal = bits.equal(primary, checker)
        if equal is False:
            mismatch = engine.reporter(name, "naive")()
            differ, elements, positions = bits.difference(primary, checker)
            mismatch.elements_differ, mismatch.elements = differ, elements
            mismatch.bits = positions
            engine.ledger.record(mismatch)
        else:
            engine.ledger.check(equal, engine.reporter(name, "naive"))
    engine.count("naive", _GRAPH, _clock() - start)
    return first


def scalar(engine: Engine, operator: Operator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs an operator that returns numbers twice."""
    injector, position = engine.injector, engine.position
    first = func(*args, **kwargs)
    start = _clock()
    second = func(*args, **kwargs)
    if injector.armed and isinstance(first, (bool, int, float)):
        first = injector.visit_scalar(position, operator.name, "primary", first)
        second = injector.visit_scalar(position, operator.name, "checker", second)
    if not _same_number(first, second):
        third = func(*args, **kwargs)
        mismatch = engine.reporter(operator.name, "naive")()
        mismatch.elements_differ = mismatch.elements = 1
        if _same_number(third, second):
            mismatch.wrong = "primary"
            first = second if engine.repairs else first
        elif _same_number(third, first):
            mismatch.wrong = "checker"
        engine.ledger.record(mismatch)
    engine.count("naive", operator, _clock() - start)
    return first


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()  # tells signed zeros apart; NaN equals NaN
    return bool(a == b)


def _compare(
    engine: Engine,
    operator: Operator,
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    again: Callable[[], list[torch.Tensor]] | None,
    suspect: Callable[[Mismatch], None] = lambda mismatch: None,
) -> None:
    """Compares the results of two executions.

    A wrong number only leads to wrong numbers, and the attempt is discarded anyway; but a wrong
    index would crash an operator that follows. So the primary's integers are set right at once.

    Args:
        first, second: Results of primary and checker.
        again: Executes once more; None where that is not possible.
        suspect: Called with each mismatch before it is recorded and anything is repaired.
    """
    third: list[torch.Tensor] | None = None
    for i, (primary, checker) in enumerate(zip(first, second, strict=True)):
        equal = bits.equal(primary, checker)
        if equal is True:
            continue
        repaired = again is not None and _repaired(engine, primary)
        if again is not None and third is None and (repaired or equal is False):
            third = again()
        if equal is False:
            mismatch = _judged(engine, operator, primary, checker, third[i] if third else None)
            suspect(mismatch)
            if repaired and mismatch.wrong == "primary":
                primary.copy_(checker)
            engine.ledger.record(mismatch)
            continue
        if repaired and third is not None:
            # Nobody waits for the comparison, so the majority of three is taken unseen.
            primary.copy_(bits.majority((primary, checker, third[i])))
        engine.ledger.check(equal, engine.reporter(operator.name, "naive"))


def _repaired(engine: Engine, tensor: torch.Tensor) -> bool:
    """Whether a wrong primary is set right at once."""
    return engine.repairs and (engine.repairs_all or not real(tensor))


def real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _judged(
    engine: Engine,
    operator: Operator,
    primary: torch.Tensor,
    checker: torch.Tensor,
    third: torch.Tensor | None,
) -> Mismatch:
    """Makes the mismatch; a third execution says which of the two was wrong."""
    mismatch = engine.reporter(operator.name, "naive")()
    differ, elements, positions = bits.difference(primary, checker)
    mismatch.elements_differ, mismatch.elements, mismatch.bits = differ, elements, positions
    mismatch.evidence = (fingerprint(primary), fingerprint(checker))
    if third is not None:
        if bits.equal(third, checker):
            mismatch.wrong = "primary"
        elif bits.equal(third, primary):
            mismatch.wrong = "checker"
    return mismatch


def _with_copies(
    operator: Operator, args: tuple, kwargs: dict[str, Any], copies: dict[int, torch.Tensor]
) -> tuple[list, dict[str, Any]]:
    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = bits.clone_span(value)
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(copied(item) for item in value)
        return value

    new_args, new_kwargs = list(args), dict(kwargs)
    for position, name in operator.written:
        if position < len(new_args):
            new_args[position] = copied(new_args[position])
        elif name in new_kwargs:
            new_kwargs[name] = copied(new_kwargs[name])
    for name in operator.written_keywords:
        if name in new_kwargs:
            new_kwargs[name] = copied(new_kwargs[name])
    return new_args, new_kwargs


# --- large writes: slice by slice, so that the copies never take more than a chunk of memory -----


def _is_large(target: torch.Tensor) -> bool:
    return (
        target.device.type == "cpu"
        and target.numel() * target.element_size() >= 4 * _CACHE
        and target.is_contiguous()
    )


def _in_cache(
    engine: Engine,
    operator: Operator,
    func: Any,
    args: tuple,
    slices: list[Slice],
) -> Any:
    """Both executions and the comparison slice by slice: memory is read and written once.

    An operator such as gradient accumulation is bound by memory; done as a whole, its copy, two
    executions and the comparison would each go through all of it.
    """
    start, primary = _clock(), 0.0
    again = _OUT_OF_PLACE.get(func)
    for slice_args, slice_kwargs, (target,) in slices:
        if again is None:
            copy = bits.clone_span(target)
            func(copy, *slice_args[1:], **slice_kwargs)
        else:
            copy = _scratch(target)
            again(*slice_args, **slice_kwargs, out=copy)
        before = _clock()
        func(*slice_args, **slice_kwargs)
        primary += _clock() - before
        if bits.equal(target, copy) is not True:
            engine.ledger.record(_judged(engine, operator, target, copy, None))
    engine.count("naive", operator, _clock() - start - primary)
    return args[0]


_scratches: dict[torch.dtype, torch.Tensor] = {}


def _scratch(target: torch.Tensor) -> torch.Tensor:
    """Memory for a slice like this one, the same for every call, with the same alignment."""
    size = target.element_size()
    memory = _scratches.get(target.dtype)
    if memory is None:
        memory = _scratches[target.dtype] = torch.empty(_CACHE // size + 64, dtype=target.dtype)
    offset = (target.data_ptr() - memory.data_ptr()) % 64 // size
    return memory[offset : offset + target.numel()]


def _mutating_in_slices(
    engine: Engine,
    operator: Operator,
    func: Any,
    args: tuple,
    kwargs: dict,
    written: Sequence[torch.Tensor],
    slices: list[Slice],
) -> Any:
    """As :func:`mutating`, with fingerprints of the checker's slices instead of whole copies."""
    start = _clock()
    expected = []
    for slice_args, slice_kwargs, targets in slices:
        copies: dict[int, torch.Tensor] = {}
        checker_args, checker_kwargs = _with_copies(operator, slice_args, slice_kwargs, copies)
        func(*checker_args, **checker_kwargs)
        made = [copies[id(t)] for t in targets]
        if engine.injector.armed:
            engine.injector.visit(engine.position, operator.name, "checker", made)
        expected.append([fingerprint(t) for t in made])
        engine.held(sum(t.numel() * t.element_size() for t in made))
    between = _clock()
    output = func(*args, **kwargs)
    if engine.injector.armed:
        engine.injector.visit(engine.position, operator.name, "primary", list(written))
    resumed = _clock()
    for (_, _, targets), digests in zip(slices, expected):
        for target, digest in zip(targets, digests):
            engine.ledger.check(
                fingerprint(target) == digest, engine.reporter(operator.name, "naive")
            )
    engine.count("naive", operator, between - start + _clock() - resumed)
    return output
