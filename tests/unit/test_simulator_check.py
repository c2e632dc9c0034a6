"""The comparison of the simulator with the benchmark over a slow link."""

import json
import sys

import pytest

from sparetrain_megatron.plan import Profile
from sparetrain_megatron.simulator.layout import Layout
from sparetrain_megatron.simulator.machine import machine
from sparetrain_megatron.simulator.model import Shape
from sparetrain_megatron.simulator.synthesise import Assumptions, Step, pieces
from tests.harness import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import simulator_check

sys.path.pop(0)

MODES = ("naive", "piggyback", "coarse", "full")
SHAPE = Shape("small", 4, 1024, 4096, 16, 16, 1024, sequence=512)
LAYOUT = Layout(tensor=1, pipeline=2, global_batch=8, sequence_parallel=False)


@pytest.fixture(scope="module")
def profiles():
    """As two ranks with a slow link would have measured them."""
    device = machine("h200").slowed(wire=0.01)
    assumptions = Assumptions()
    step = Step(pieces(SHAPE, LAYOUT, device, assumptions), LAYOUT, device.memory, assumptions)
    found = []
    for stage in range(2):
        profile, _ = step.profile(stage)
        model = {**profile.identity.model, "hidden_size": 1024, "seq_length": 512}
        found.append(
            profile.model_copy(
                update={"identity": profile.identity.model_copy(update={"model": model})}
            )
        )
    return found, step


def measured(step, shares):
    message = 2 * 512 * 1024
    return {
        "settings": {"hidden": 1024, "sequence": 512},
        "bits_per_second": 8 * message / step.pieces.wire,
        "idle_share": step.idle_share,
        "step_s": step.step_seconds,
        "modes": {
            mode: {"critical_path_share": share, "ratio": 1 + share}
            for mode, share in shares.items()
        },
    }


def test_the_measured_step_is_found_again(profiles):
    found, step = profiles
    result = simulator_check.predict(measured(step, dict.fromkeys(MODES, 0.1)), found)
    assert result["message_s"] == pytest.approx(step.pieces.wire)
    assert result["step_s"]["predicted"] == pytest.approx(step.step_seconds, rel=0.02)
    assert result["idle_share"]["predicted"] == pytest.approx(step.idle_share, abs=0.02)
    shares = [result["modes"][mode]["predicted"] for mode in MODES]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0


def test_what_is_off_by_more_than_a_quarter_is_said(profiles, tmp_path, capsys):
    found, step = profiles
    first = simulator_check.predict(measured(step, dict.fromkeys(MODES, 0.1)), found)
    shares = {mode: row["predicted"] for mode, row in first["modes"].items()}
    for profile in found:
        profile.save(tmp_path / "profiles" / f"profile.rank{profile.stage}.json")
    source, out = tmp_path / "overlap.json", tmp_path / "check.json"
    arguments = [str(source), str(tmp_path / "profiles"), "--out", str(out)]
    source.write_text(json.dumps(measured(step, {m: 1.2 * s for m, s in shares.items()})))
    assert simulator_check.main(arguments) == 0
    shares["naive"] *= 2
    source.write_text(json.dumps(measured(step, shares)))
    assert simulator_check.main(arguments) == 1
    rows = json.loads(out.read_text())["modes"]
    assert [mode for mode in MODES if not rows[mode]["within"]] == ["naive"]
    assert "off" in capsys.readouterr().out


def test_profiles_of_another_job_are_refused(profiles, tmp_path, capsys):
    found, step = profiles
    overlap = measured(step, {"naive": 0.1})
    overlap["settings"]["hidden"] = 512
    with pytest.raises(Exception, match="hidden_size 1024, not 512"):
        simulator_check.predict(overlap, found)
    source = tmp_path / "overlap.json"
    source.write_text(json.dumps(overlap))
    with pytest.raises(SystemExit) as stopped:
        simulator_check.main([str(source), str(tmp_path)])
    assert stopped.value.code == 2 and "no profile.rank" in capsys.readouterr().err
    assert isinstance(found[0], Profile)


@pytest.mark.parametrize(
    "path", (ROOT / "benchmarks" / "results").glob("simulator_check-*.json"), ids=lambda p: p.stem
)
def test_stored_comparisons_are_within(path):
    stored = json.loads(path.read_text())
    assert set(stored["modes"]) == set(MODES)
    for row in stored["modes"].values():
        off = abs(row["predicted"] - row["measured"])
        assert row["within"] and off <= max(0.25 * row["measured"], 0.015)
