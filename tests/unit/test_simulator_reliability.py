"""What corruption costs a long run."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.simulator.reliability import (
    ROLLBACK_STEPS,
    Run,
    compare,
    loss_spikes,
    periodic_replay,
    sparetrain,
    unprotected,
)
from tests.harness import ROOT

RUN = Run(gpus=16384, hours=1000, rate=1e-6, step=10.0, rollback=12.3)


def test_numbers_of_a_known_run():
    assert RUN.corruptions == pytest.approx(16.384)
    assert unprotected(RUN).undetected == RUN.corruptions
    assert unprotected(RUN).wasted == 0
    protected = sparetrain(RUN, 0.03)
    # 30 hours of overhead, and 16.9 rollbacks of 12.3 s.
    assert protected.wasted == pytest.approx(30 + 16.384 * 1.03 * 12.3 / 3600, rel=1e-3)
    assert protected.undetected == 0 and protected.clean() == 1
    replay = periodic_replay(RUN, 100, found=1.0)
    assert replay.undetected == pytest.approx(0.99 * RUN.corruptions)
    assert replay.wasted == pytest.approx(10 + 0.16384 * (900 + 1800 + 10) / 3600)
    spikes = loss_spikes(RUN, visible=0.1)
    assert spikes.undetected == pytest.approx(0.9 * RUN.corruptions)


@given(
    st.integers(1, 100_000), st.floats(0.1, 1e4), st.floats(0, 1e-3), st.floats(0.1, 100),
    st.floats(0, 1), st.floats(0, 1),
)  # fmt: skip
def test_nothing_is_detected_that_did_not_happen(gpus, hours, rate, step, overhead, missed):
    run = Run(gpus, hours, rate, step)
    for outcome in compare(run, overhead, missed=missed):
        assert 0 <= outcome.undetected <= run.corruptions * (1 + overhead) * (1 + 1e-9)
        assert outcome.wasted >= 0
        assert 0 <= outcome.clean() <= 1
        assert outcome.to_dict(run)["strategy"] == outcome.strategy


def test_a_rollback_costs_what_was_measured_unless_said_otherwise():
    measured = json.loads((ROOT / "benchmarks" / "results" / "rollback.json").read_text())
    assert pytest.approx(measured["rollback_steps"], abs=0.005) == ROLLBACK_STEPS
    run = dataclasses.replace(RUN, rollback=None, rate=1e-9)
    faults = run.corruptions * 1.03
    rollbacks = (sparetrain(run, 0.03).wasted - 30) * 3600 / faults
    assert rollbacks == pytest.approx(ROLLBACK_STEPS * 10.3, rel=1e-3)


def test_every_step_replayed_finds_what_it_can():
    assert periodic_replay(RUN, 1, found=1.0).undetected == 0
    assert periodic_replay(RUN, 1).wasted > RUN.hours


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"hours": 0}, {"rate": -1}, {"rollback": -1}])
def test_wrong_runs(wrong):
    values = {"gpus": 8, "hours": 1, "rate": 0, "step": 1, **wrong}
    with pytest.raises(UsageError):
        Run(**values)
    with pytest.raises(UsageError):
        periodic_replay(RUN, 0)
