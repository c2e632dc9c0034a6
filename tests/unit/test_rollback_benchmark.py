"""The arithmetic of the benchmark of rollbacks; the run itself is a benchmark."""

import json
import sys

import pytest

from tests.harness import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import rollback

sys.path.pop(0)


def events(cost):
    """Clean iterations take a second; those with a fault `cost` seconds more."""
    faulty = [rollback.WARM_UP + rollback.EVERY * (i + 1) for i in range(len(rollback.FAULTS))]
    total, found = 0.0, []
    for iteration in range(1, faulty[-1] + rollback.EVERY):
        total += 1 + cost * (iteration in faulty) + 5 * (iteration == 1)
        if iteration in faulty:
            found.append({"kind": "rollback", "rank": 0, "iteration": iteration})
            found.append({"kind": "rollback", "rank": 1, "iteration": iteration})
        for rank in (0, 1):
            found.append(
                {"kind": "iteration", "rank": rank, "iteration": iteration, "seconds_total": total}
            )
    return found


def test_what_an_iteration_with_a_rollback_takes_longer():
    found = rollback.summary(events(0.9), 1)
    assert found["clean_step_s"] == pytest.approx(1)
    assert found["rollback_steps"] == pytest.approx(0.9)
    assert found["rollbacks"] == len(rollback.FAULTS)


def test_a_fault_that_led_to_no_rollback_is_no_measurement():
    some = [e for e in events(0.9) if (e["kind"], e["iteration"]) != ("rollback", 13)]
    with pytest.raises(ValueError, match="not \\[9, 13"):
        rollback.summary(some, 1)


def test_the_stored_figures():
    stored = json.loads((ROOT / "benchmarks" / "results" / "rollback.json").read_text())
    assert stored["rollbacks"] == 2 * len(rollback.FAULTS)
    assert 0.5 < stored["rollback_steps"] <= stored["rollback_steps_most"] < 1.5
