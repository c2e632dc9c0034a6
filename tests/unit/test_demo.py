"""The demo's own judgement: what it counts as found, as false alarm, and as equal."""

import subprocess
import sys

import pytest
import torch

from tests.harness import ROOT


@pytest.fixture(scope="module")
def demo():
    """The modules ``run_demo`` and ``runs``."""
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    try:
        import run_demo
        import runs

        yield run_demo, runs
    finally:
        sys.path.pop(0)


def report(fault, **changes):
    """The mismatch event that a perfect run would have for ``fault``."""
    event = {
        "kind": "mismatch",
        "iteration": fault.iteration,
        "attempt": fault.attempt,
        "rank": fault.rank,
        "phase": fault.phase,
        "operator": fault.operator or "sum",
        "method": "naive",
        "wrong": "primary",
    }
    return event | changes


class TestAssign:
    def test_every_fault_has_its_own_report(self, demo):
        faults = demo[0].FAULTS
        events = [report(fault) for fault in reversed(faults)]
        found, false_alarms = demo[0].assign(events)
        assert found == [report(fault) for fault in faults]
        assert false_alarms == []

    def test_a_missing_report_is_not_made_up_by_another_iterations(self, demo):
        faults = demo[0].FAULTS
        events = [report(fault) for fault in faults[1:]] + [report(faults[1])]
        found, _ = demo[0].assign(events)
        assert found[0] is None
        assert None not in found[1:]

    def test_one_report_counts_for_one_of_two_faults(self, demo):
        both = [i for i, f in enumerate(demo[0].FAULTS) if (f.iteration, f.attempt) == (30, 1)]
        events = [report(f) for i, f in enumerate(demo[0].FAULTS) if i != both[1]]
        found, _ = demo[0].assign(events)
        assert found[both[0]] is not None
        assert found[both[1]] is None

    def test_report_without_a_fault_is_a_false_alarm(self, demo):
        events = [report(fault) for fault in demo[0].FAULTS]
        alarms = [report(demo[0].FAULTS[0], iteration=2), report(demo[0].FAULTS[0], attempt=2)]
        assert demo[0].assign(events + alarms)[1] == alarms


def test_faults_cover_phases_and_both_ranks(demo):
    faults = demo[0].FAULTS
    phases = {"forward", "recompute", "backward", "accumulate", "clip", "optimizer"}
    assert {fault.phase for fault in faults} == phases | {"communication"}
    assert {fault.rank for fault in faults} == {0, 1}
    assert all(fault.iteration <= demo[1].ITERATIONS for fault in faults)


class TestCompareStates:
    @pytest.fixture
    def state(self):
        weights = torch.tensor([1.0, float("nan"), 0.0, 3.0]).bfloat16()
        return {
            "model": {"w": weights, "nothing": None, "step": torch.tensor(3)},
            "optimizer": {"moments": [torch.ones(4)], "step": 7},
        }

    def runs(self, demo, tmp_path, *states):
        made = []
        for name, state in zip("ab", states, strict=True):
            folder = tmp_path / name / "checkpoint" / "mp_rank_00"
            folder.mkdir(parents=True)
            torch.save(state, folder / "model_optim_rng.pt")
            made.append(demo[1].Run(tmp_path / name))
        return made

    def test_equal_with_nan(self, demo, tmp_path, state):
        difference = demo[1].compare_states(*self.runs(demo, tmp_path, state, state))
        assert difference.equal
        assert difference.weights == 5

    def test_signed_zero_differs(self, demo, tmp_path, state):
        weights = state["model"]["w"].clone()
        weights[2] = -0.0
        other = {**state, "model": {**state["model"], "w": weights}}
        difference = demo[1].compare_states(*self.runs(demo, tmp_path, state, other))
        assert difference.weights_differ == 1
        assert not difference.equal

    @pytest.mark.parametrize("changed", [{"step": 8}, {"moments": [torch.zeros(4)]}])
    def test_optimizer_state_differs(self, demo, tmp_path, state, changed):
        other = {**state, "optimizer": {**state["optimizer"], **changed}}
        difference = demo[1].compare_states(*self.runs(demo, tmp_path, state, other))
        assert not difference.weights_differ
        assert not difference.equal

    def test_nothing_to_compare_is_not_equal(self, demo, tmp_path):
        (tmp_path / "a").mkdir()
        run = demo[1].Run(tmp_path / "a")
        assert not demo[1].compare_states(run, run).equal


@pytest.mark.acceptance
def test_demo_passes_within_five_minutes(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo" / "run_demo.py")]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
