"""A decision in the recompute that is another one than the forward's, here or on another rank."""

import pytest
import torch

from tests.unit.protected import Watched
from tests.unit.test_piggyback import Segment


class Routed(Segment):
    """A segment whose operators depend on what has been decided.

    Args:
        engine: Protects it.
        outputs_only: Whether its operators are left to a tape.
    """

    def __init__(self, engine, outputs_only=False):
        super().__init__(engine, None)
        self.outputs_only = outputs_only
        self.said = []

    def passes(self, forward, recompute, told=False):
        """Runs both passes, each with a decision; ``told``: another rank decided otherwise."""
        engine, x = self.engine, torch.linspace(-1, 1, 16).reshape(4, 4)
        with engine.active():
            first = engine.first_pass("routed", [x], self.outputs_only)
            if first is None:
                return
            with engine.within(first):
                output = self.run(x, forward)
            engine.close_first_pass(first, [output])
            with engine.at(phase="recompute"):
                second = engine.second_pass(first, [x])
                with engine.within(second):
                    output = self.run(x, recompute, told)
                if self.outputs_only:
                    engine.compare_outputs(first, [output])
                engine.close_second_pass(second)
        engine.outcome = engine.verdict()

    def run(self, x, decision, told=False):
        engine = self.engine
        with engine.paused():
            choice = torch.tensor(decision)
        otherwise = engine.decides("router", [choice])
        self.said.append(otherwise)
        if told or otherwise:
            engine.decided_otherwise()
        for i in decision if not told else [*decision, 0, 1]:
            x = x @ x if i % 2 else torch.tanh(x)
        return x


@pytest.fixture(params=[False, True], ids=["every operator", "outputs only"])
def routed(request):
    return Routed(Watched(), request.param)


def test_the_same_decision(routed):
    routed.passes([1, 2, 3], [1, 2, 3])
    assert routed.said == [False, False]
    assert routed.engine.found == []


@pytest.mark.parametrize("other", [[1, 2, 2], [2, 1, 3], [1, 2], [1, 2, 3, 4]])
def test_another_decision_names_who_decided_and_nothing_else(routed, other):
    routed.passes([1, 2, 3], other)
    assert routed.said == [False, True]
    (mismatch,) = routed.engine.found
    assert (mismatch.operator, mismatch.position.phase) == ("router", "recompute")
    assert "decides otherwise" in mismatch.note
    assert mismatch.wrong == "unknown"
    assert routed.engine.outcome.dirty


def test_another_rank_s_decision_is_no_mismatch_of_this_one(routed):
    routed.passes([1, 2, 3], [1, 2, 3], told=True)
    assert routed.engine.found == []
    routed.passes([1, 2, 3], [1, 2, 3])  # nothing has become naive for it
    assert len(routed.said) == 4


def test_a_decision_that_comes_back_is_the_software_s():
    routed = Routed(Watched())
    routed.passes([1, 2, 3], [3, 2, 1])
    routed.engine.discard()
    routed.engine.begin(1, 2)
    routed.passes([1, 2, 3], [3, 2, 1])
    assert [m.wrong for m in routed.engine.found] == ["unknown", "software"]
    routed.passes([1, 2, 3], [3, 2, 1])  # executed naively from now on
    assert len(routed.engine.found) == 2


def test_a_recompute_that_departs_after_a_wrong_number_is_not_the_software_s():
    """A number decides how often a loop runs."""
    engine = Watched("iteration=1,phase=forward,operator=sum,bit=30")
    x = torch.ones(4)

    def function(x):
        total = x.sum()
        for _ in range(3 if 3 < float(total) < 5 else 2):
            x = torch.tanh(x)
        return x

    segment = Segment(engine, function)
    with engine.active():
        segment.forward(x)
        segment.recompute(x)
    assert engine.verdict().dirty
    assert engine.operators[0] == "sum"
    assert all(mismatch.wrong != "software" for mismatch in engine.found)
