"""Operators that are recorded, and executed again from what is held of them."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sparetrain_megatron.dmr.deferred import below_autograd
from sparetrain_megatron.dmr.operators import Kind
from sparetrain_megatron.faults.targets import Recorder
from tests.unit.protected import Block, Watched, different


@pytest.fixture(autouse=True)
def generator():
    """Leaves torch's generator as it was."""
    with torch.random.fork_rng():
        yield


def record(engine, body):
    """Runs a body with a tape; returns what came of it, by name, and the first tape."""
    torch.manual_seed(11)
    with engine.active():
        engine.open_tape()
        tape = engine.tape
        result = body()
        engine.close_tape()
    result = result if isinstance(result, (tuple, list)) else (result,)
    values = {str(i): value.detach().clone() for i, value in enumerate(result)}
    return {**values, "generator": torch.get_rng_state()}, tape


def plain(body):
    """The same without an engine."""
    torch.manual_seed(11)
    result = body()
    result = result if isinstance(result, (tuple, list)) else (result,)
    values = {str(i): value.detach().clone() for i, value in enumerate(result)}
    return {**values, "generator": torch.get_rng_state()}


def ramp(*shape, dtype=torch.float32):
    """A value from outside of the tape."""
    with _disable_current_modes():
        return torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape).to(dtype)


# --- bodies: each one thing that a tape must get right ----------------------------------------


def block(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Block(8).to(dtype)
    x = ramp(1, 5, 8, dtype=dtype).requires_grad_()
    module(x).float().square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def views():
    x = ramp(4, 6)
    a = (x * 2).t()[1:3].unflatten(1, (2, 2))
    b = a.permute(2, 0, 1).contiguous().view(-1)[::3]
    return a + 1, b * 3, (x[1:, ::2] - 1).unsqueeze(0).expand(2, 3, 3).sum(0)


def expanded():
    """What is held has many elements in one place, as the gradient of a sum has."""
    with _disable_current_modes():
        x = ramp(4, 1).expand(4, 3)
    return x * 2, x.sum(0)


def in_place():
    x = ramp(4, 4)
    y = x + 1
    z = y * 2
    y.mul_(3).add_(z)
    torch.exp(z, out=z)
    return y, z


def in_place_through_views():
    y = ramp(4, 4) * 2
    first = y[0] + 1
    y[0].add_(5)
    y.t()[2].mul_(-1)
    y.view(-1)[3:9:2].sub_(first[:3])
    return y, first


def partly_written():
    whole = torch.empty(4, 5)
    whole[:2] = ramp(2, 5) * 2
    whole[2:, 1:3].copy_(ramp(2, 2) + 1)
    filled = torch.empty_like(whole).fill_(2)
    torch.empty(100)  # allocated, and never written
    return whole[:2].clone(), whole[2:, 1:3].clone(), filled, whole[:2]


def random():
    x = ramp(6, 6)
    mask = torch.empty_like(x).bernoulli_(0.5)
    kept = torch.nn.functional.dropout(x + 1, 0.3, training=True)
    return mask * x, kept, torch.rand(3) + x[0, :3], torch.randn_like(x) * 2


def own_generator():
    own = torch.Generator().manual_seed(3)
    return torch.rand(4, generator=own) * 2, torch.rand(4, generator=own) + ramp(4)


def scalars():
    x = ramp(5) * 2
    return x * x.sum().item(), x + float(x.max()), x[int(x.argmax())] * 2


def lists():
    values = torch._foreach_mul([ramp(3), ramp(2, 2)], 2.0)
    torch._foreach_add_(values, 1.0)
    return *values, *torch._foreach_norm(values), torch.cat(values[:1] * 2), *values[1].split(1)


def integers():
    x = ramp(5, 3) + 0.5
    indices = x.argmax(1)
    return x.gather(1, indices[:, None]), torch.where(x > 1, x, -x), indices + 1


def masks():
    """Results whose size depends on values."""
    x = ramp(5, 3)
    return x[x > 0.5] * 2, torch.masked_select(x + 1, x < 0)


def several_results():
    values, indices = (ramp(4, 4) * 3).max(1)
    mean, (a, b) = ramp(4, 4).mean(0), (ramp(4, 4) + 1).chunk(2)
    return values, indices, mean, a * b


def types():
    x = (ramp(4, 4) * 3).to(torch.bfloat16)
    y = x @ x + x
    return y, y.view(torch.int16) + 1, (y.float() * 2).to(torch.float16)


BODIES = {
    function.__name__: function
    for function in (
        block,
        views,
        expanded,
        in_place,
        in_place_through_views,
        partly_written,
        random,
        own_generator,
        scalars,
        lists,
        integers,
        masks,
        several_results,
        types,
    )
}
BODIES["block in BF16"] = lambda: block(torch.bfloat16)


@pytest.mark.parametrize("name", BODIES)
def test_recorded_and_replayed(name):
    engine = Watched(repairs=False)
    result, tape = record(engine, BODIES[name])
    assert different(plain(BODIES[name]), result) == []
    pending = len(tape.entries)
    assert tape.leaving
    torch.rand(1)  # the replay must not wind the generator back
    before = torch.get_rng_state()
    assert not engine.verdict().dirty
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.deferred.operators["drained"] >= pending
    assert engine.found == []
    assert engine.deferred.held_bytes == 0


def faults(body):
    """Every execution of every operator: (operator, nth, execution)."""
    engine = Watched(repairs=False)
    engine.injector = recorder = Recorder()
    record(engine, body)
    engine.verdict()
    counts: Counter = Counter()
    for visit in recorder.visits:
        if visit.phase != "held":
            counts[visit.operator, visit.execution] += 1
            yield visit.operator, counts[visit.operator, visit.execution], visit.execution


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("bit", [6, 30])
def test_every_operator_every_execution(name, bit):
    """A fault that is left in what the body gives back is found, and so is who was wrong."""
    body = BODIES[name]
    expected, hit, caught = plain(body), 0, Counter()
    offered = list(faults(body))
    for operator, nth, execution in offered[bit % 7 :: 7] if len(offered) > 100 else offered:
        spec = (
            f"iteration=1,operator={operator},nth={nth},execution={execution},element=1,bit={bit}"
        )
        engine = Watched(spec, repairs=False)
        try:
            result, _ = record(engine, body)
        except (RuntimeError, IndexError):
            continue  # an operator refused the wrong value: loud, not silent
        outcome = engine.verdict()
        (fault,) = engine.injector.records
        assert outcome.dirty == bool(engine.found)
        hit += fault["effect"]
        if different(expected, result):
            assert execution == "primary", spec
            assert engine.found, spec
        for mismatch in engine.found:
            assert mismatch.wrong in (execution, "unknown"), spec
            if mismatch.method == "deferred":
                caught[execution] += 1
                assert mismatch.wrong == execution, spec
    assert hit > 2
    assert caught["primary"] > 0
    assert caught["checker"] > 0


@pytest.mark.parametrize(
    "name", ["block", "views", "expanded", "in_place", "types", "several_results"]
)
def test_a_fault_in_what_is_held(name):
    """Each held tensor in its turn."""
    body = BODIES[name]
    engine = Watched(repairs=False)
    _, tape = record(engine, body)
    found = 0
    for nth in range(1, sum(t is not None for t in tape.held) + 1):
        spec = f"iteration=1,phase=held,operator=boundary,nth={nth},pattern=negate"
        engine = Watched(spec, repairs=False)
        result, _ = record(engine, body)
        engine.verdict()
        assert different(plain(body), result) == []
        if engine.injector.records and engine.injector.records[0]["effect"]:
            (mismatch, *_) = engine.found
            assert (mismatch.method, mismatch.position.phase) == ("deferred", "forward"), spec
            found += 1
    assert found > 0
    assert engine.deferred.held_bytes == 0


def test_what_leaves_into_an_outside_buffer():
    """A gradient that is accumulated is compared with the value that went into the buffer."""
    buffer = ramp(4)

    def body():
        gradient = ramp(4) * 2
        buffer.add_(gradient)
        gradient.zero_()  # what is left of it at the end tells nothing
        return ramp(4) + 1

    for spec, found in (("operator=mul", ["mul"]), ("operator=add_,nth=1", ["add_"])):
        engine = Watched(f"iteration=1,{spec},bit=12", repairs=False)
        _, tape = record(engine, body)
        assert [value.after for value in tape.leaving] == [1, 3]
        engine.verdict()
        assert engine.operators == found
    engine = Watched()
    record(engine, body)
    engine.verdict()
    assert engine.found == []
    assert engine.counters.checks["naive"] == {"mutating": 1}


def test_an_outside_value_that_the_tape_has_read_is_written():
    x = ramp(4)

    def body():
        y = x * 2
        x.add_(1)
        return y, x * 3

    engine = Watched("iteration=1,operator=mul,nth=2,execution=checker,bit=12", repairs=False)
    before = x.clone()
    result, tape = record(engine, body)
    assert torch.equal(result["1"], (before + 1) * 3)
    assert sum(t is not None for t in tape.held) == 2
    engine.verdict()
    assert engine.operators == ["mul"]
    x.copy_(before)
    engine = Watched()
    record(engine, body)
    engine.verdict()
    assert engine.found == []


def test_what_is_dead_at_the_end_is_not_compared():
    engine = Watched("iteration=1,operator=exp,bit=20", repairs=False)
    result, tape = record(engine, lambda: [ramp(4).exp(), ramp(4) + 1][1])
    assert len(tape.leaving) == 1
    engine.verdict()
    assert engine.found == []
    assert torch.equal(result["0"], ramp(4) + 1)


def test_one_operator_a_step():
    engine = Watched()
    _, tape = record(engine, BODIES["in_place_through_views"])
    engine.injector = recorder = Recorder()
    executed = []
    with below_autograd():
        while engine.deferred.unit():
            executed.append(sum(visit.phase != "held" for visit in recorder.visits))
    computing = [entry.operator.kind is not Kind.UNINITIALISED for entry in tape.entries]
    steps = [sum(computing[: i + 1]) for i in range(len(computing))]
    assert executed == [*steps, steps[-1]]  # and a last step that finds the end


def test_a_replay_frees_what_it_needs_no_longer():
    def body():
        x = ramp(1000)
        for _ in range(50):
            x = x * 1.5
        return x

    engine = Watched()
    _, tape = record(engine, body)
    assert tape.transient_bytes <= 3 * 4000
    assert 4000 <= tape.held_bytes <= 2 * 4000
    alive = 0
    with below_autograd():
        while engine.deferred.unit():
            values = tape._values or ()
            sizes = [v.untyped_storage().nbytes() for v, h in zip(values, tape.held) if v is not h]
            alive = max(alive, sum(sizes))
    assert 0 < alive <= tape.transient_bytes


def test_constants_are_not_counted_as_held():
    weight = ramp(100, 100)
    engine = Watched()
    engine.deferred.mark_constants([weight])
    _, tape = record(engine, lambda: ramp(1, 100) @ weight)
    assert 400 <= tape.held_bytes < 1000
    assert engine.deferred.held_bytes == tape.held_bytes


def test_a_region_that_mutates_a_storage_itself_ends_the_tape():
    def body():
        y = ramp(8) * 2
        y.resize_(2)
        return y + 1, ramp(3) * 2

    engine = Watched()
    result, first = record(engine, body)
    assert different(plain(body), result) == []
    assert len(engine.closed) == 2
    assert engine.closed[0] is first
    engine.verdict()
    assert engine.found == []
