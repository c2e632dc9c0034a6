"""The recompute as the second execution of the forward."""

import pytest
import torch

from sparetrain_megatron.dmr.piggyback import Entry, FirstPass, SecondPass, same
from tests.unit.protected import Watched, different, train


@pytest.fixture(autouse=True)
def generator():
    """Leaves torch's generator as it was."""
    with torch.random.fork_rng():
        yield


class Segment:
    """A checkpointed function: one call runs the forward, the other the recompute.

    Args:
        engine: Protects it.
        function: Of one tensor.
        key: Names it.
    """

    def __init__(self, engine, function, key="segment"):
        self.engine, self.function, self.key = engine, function, key

    def forward(self, *inputs):
        self.first = self.engine.first_pass(self.key, inputs)
        if self.first is None:
            return self.function(*inputs)
        with self.engine.within(self.first):
            return self.function(*inputs)

    def recompute(self, *inputs, function=None):
        function = function or self.function
        with self.engine.at(phase="recompute"):
            if self.first is None:
                return function(*inputs)
            second = self.engine.second_pass(self.first, inputs)
            with self.engine.within(second):
                result = function(*inputs)
            self.engine.close_second_pass(second)
            return result


def layer(x):
    return (x @ x).relu().mul_(2).sum(0)


def both(engine, function=layer, *, again=None, inputs=None):
    """Runs forward and recompute of one segment and a verdict; returns both results."""
    segment = Segment(engine, function)
    inputs = inputs or (torch.rand(4, 4),)
    with engine.active():
        results = segment.forward(*inputs), segment.recompute(*inputs, function=again)
    engine.outcome = engine.verdict()
    return results


def test_two_passes_agree():
    engine = Watched()
    first, second = both(engine)
    assert torch.equal(first, second)
    assert engine.found == []
    # Each operator ran once a pass: mm, relu, mul_, sum.
    assert engine.counters.checks == {"piggyback": {"pure": 3, "mutating": 1}}


@pytest.mark.parametrize("phase", ["forward", "recompute"])
@pytest.mark.parametrize("operator", ["mm", "relu", "mul_", "sum"])
def test_a_fault_in_either_pass_is_found(phase, operator):
    engine = Watched(f"iteration=1,phase={phase},operator={operator},bit=30,element=3")
    both(engine)
    assert engine.operators == [operator]
    mismatch = engine.found[0]
    assert mismatch.method == "piggyback"
    assert engine.outcome.dirty
    # Without a third execution the place is that of the comparison.
    assert mismatch.position.phase == ("recompute" if operator == "mul_" else phase)
    if operator != "mul_":  # it has overwritten its input: there is no third execution
        assert mismatch.wrong == ("primary" if phase == "forward" else "checker")
        if phase == "recompute":
            assert (mismatch.elements_differ, mismatch.bits) == (1, [30])


def test_what_follows_from_a_fault_is_one_mismatch():
    engine = Watched("iteration=1,phase=forward,operator=mm,bit=30")
    both(engine)
    assert len(engine.found) == 1
    assert engine.found[0].followed_by == 3


def test_a_fault_that_the_output_hides_is_found():
    """Of such faults the segment's last output shows nothing, but gradients do."""
    engine = Watched("iteration=1,phase=recompute,operator=mul,bit=1")
    first, second = both(engine, lambda x: (x * 2 > 1).float().sum())
    assert torch.equal(first, second)
    assert engine.operators == ["mul"]


def test_integers_are_checked_at_once_and_repaired():
    engine = Watched("iteration=1,phase=forward,operator=argmax,bit=40")
    first, second = both(engine, lambda x: x[x.argmax(0)])
    assert torch.equal(first, second)
    assert engine.operators == ["argmax"]
    assert engine.found[0].method == "naive"


def test_integers_written_in_place_are_repaired():
    def function(x):
        index = torch.zeros(4, dtype=torch.int64)
        index.add_(1)
        return x[index]

    engine = Watched("iteration=1,phase=forward,operator=add_,bit=40")
    first, second = both(engine, function)
    assert torch.equal(first, second)
    assert engine.operators == ["add_"]


def test_random_masks():
    """An operator that draws and returns booleans is checked from the same state."""
    engine = Watched()
    state = torch.get_rng_state()

    def function(x):
        torch.set_rng_state(state)
        return torch.native_dropout(x, 0.5, True)[0]

    first, second = both(engine, function)
    assert torch.equal(first, second)
    assert engine.found == []
    end = torch.get_rng_state()
    function(torch.rand(4, 4))
    assert torch.equal(torch.get_rng_state(), end)  # the check has drawn nothing


def test_departed_sequence():
    """A recompute that runs other operators verifies nothing, and says so."""
    engine = Watched()
    both(engine, again=lambda x: layer(x + 0))
    (mismatch,) = engine.found
    assert mismatch.wrong == "software"
    assert mismatch.operator == "segment"
    assert engine.outcome.dirty
    # The same kind of segment is executed naively from then on.
    both(engine, again=lambda x: layer(x + 0))
    assert len(engine.found) == 1
    assert engine.counters.checks["naive"]["pure"] == 7  # 3 in the forward, 4 in the recompute


def test_a_recompute_that_ends_early_is_found():
    engine = Watched()
    both(engine, again=lambda x: (x @ x).relu())
    assert [m.wrong for m in engine.found] == ["software"]


def test_a_missing_recompute_is_found():
    engine = Watched()
    with engine.active():
        Segment(engine, layer).forward(torch.rand(4, 4))
    assert engine.verdict().dirty
    assert [m.wrong for m in engine.found] == ["software"]


def test_software_nondeterminism_is_recognised():
    """The very same difference in a repetition of the iteration is no accident of the hardware."""
    engine = Watched()
    calls = []

    def function(x):
        calls.append(None)
        return x * (1.0 if len(calls) % 2 else 3.0)

    inputs = (torch.rand(4, 4),)
    both(engine, function, inputs=inputs)
    assert [m.wrong for m in engine.found] != ["software"]
    engine.discard()
    engine.begin(1, 2)
    both(engine, function, inputs=inputs)
    assert engine.found[-1].wrong == "software"
    engine.discard()
    engine.begin(1, 3)
    both(engine, function, inputs=inputs)
    assert len(engine.found) == 2  # it runs naively now, and each half agrees with itself
    assert not engine.outcome.dirty


def test_another_fault_in_the_repetition_is_not_software():
    specs = [f"iteration=1,attempt={n},phase=forward,operator=mm,bit={20 + n}" for n in (1, 2)]
    engine = Watched(*specs)
    inputs = (torch.rand(4, 4),)
    for attempt in (1, 2):
        engine.begin(1, attempt)
        both(engine, inputs=inputs)
    assert [m.wrong for m in engine.found] == ["primary", "primary"]


@pytest.mark.parametrize("fault", [None, "forward", "recompute"])
def test_nested_passes(fault):
    """Selective recompute inside full recompute: the inner one is compared by both."""
    specs = [] if fault is None else [f"iteration=1,phase={fault},operator=relu,nth=1,bit=30"]
    engine = Watched(*specs)
    x = torch.rand(4, 4)
    inner: list[Segment] = []

    def outer(x):
        inner.append(Segment(engine, lambda y: (y @ y).relu(), "inner"))
        return inner[-1].forward(x * 2).sum()

    segment = Segment(engine, outer, "outer")
    with engine.active():
        segment.forward(x)
        segment.recompute(x)  # its inner forward is compared with the first one, and opens its own
        inner[-1].recompute(x * 2)
    dirty = engine.verdict().dirty
    assert dirty == (fault is not None)
    if fault is None:
        assert engine.found == []
        assert engine.counters.checks["piggyback"]["pure"] == 4
    else:
        assert "relu" in engine.operators


@pytest.mark.parametrize("repairs", [True, False])
def test_held_inputs_are_compared(repairs):
    engine = Watched("iteration=1,phase=held,bit=7,element=2", repairs=repairs)
    both(engine)
    assert engine.operators[0] == "checkpoint_input"
    assert engine.found[0].position.phase == "held"


def test_held_indices_are_put_back():
    index = torch.tensor([0, 2])
    engine = Watched("iteration=1,phase=held,output=1,bit=40")
    first, second = both(engine, lambda x, i: x[i], inputs=(torch.rand(4, 4), index))
    assert torch.equal(first, second)
    assert index.tolist() == [0, 2]
    assert engine.operators == ["checkpoint_input"]


def test_switched_off():
    engine = Watched(piggyback=False)
    both(engine)
    assert engine.counters.checks == {"naive": {"pure": 6, "mutating": 2}}
    outside = Watched()
    assert outside.first_pass("key", ()) is None  # not active


def test_models_with_torchs_own_checkpoint():
    """Without an adapter, forward and recompute are each executed naively."""
    engine = Watched()
    assert different(train(), train(around=engine.protect)) == []
    assert set(engine.counters.checks) == {"naive"}


def test_same():
    assert same((1, 2), (1, 2)) is True
    assert same((1, 2), (2, 1)) is False
    assert same((1,), (1, 1)) is False
    flags = same((torch.tensor(1), 5), (torch.tensor(1), 5))
    assert bool(flags) is True
    assert (
        bool(same((torch.tensor(1), torch.tensor(2)), (torch.tensor(1), torch.tensor(3)))) is False
    )


def test_walk():
    first = FirstPass("key", ())
    first.entries = [Entry("mm", (1,)), Entry("add", (2,))]
    second = SecondPass(first)
    assert not second.complete
    assert second.advance("mm") is first.entries[0]
    assert second.advance("sub") is None
    assert second.departed
    assert second.advance("add") is None  # once departed, nothing is compared any more
    other = SecondPass(first)
    other.advance("mm")
    other.advance("add")
    assert other.complete
    assert other.advance("mm") is None
    assert not other.complete


def test_an_entry_that_arrives_late():
    seen = []
    entry = Entry("all_reduce", on_arrival=seen.append)
    entry.arrived((5,))
    assert entry.digests == (5,)
    assert seen == [(5,)]
