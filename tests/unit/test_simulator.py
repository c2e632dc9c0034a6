"""Simulated steps: profiles that the planners take, overheads that make sense, and the command."""

import dataclasses
import json

import pytest
from plan_profiles import verify

from sparetrain_megatron import cli
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Profile, plan
from sparetrain_megatron.simulator.layout import Layout
from sparetrain_megatron.simulator.machine import machine
from sparetrain_megatron.simulator.measured import simulate_measured
from sparetrain_megatron.simulator.model import Shape
from sparetrain_megatron.simulator.search import fits, search
from sparetrain_megatron.simulator.simulate import simulate
from sparetrain_megatron.simulator.synthesise import Assumptions, Step, pieces

SMALL = Shape("small", 8, 2048, 8192, 16, 8, 32000, sequence=2048)
EXPERTS = dataclasses.replace(SMALL, experts=8, shared=2048, ffn=2048)
LAYOUT = Layout(tensor=8, pipeline=2, global_batch=4)
SLOW = machine("h200").slowed(wire=0.005, nvlink=0.3)
PAPER = Assumptions(bubbles=False, data_windows=False, fingerprints=False, record=0.0)


def made(layout=LAYOUT, shape=SMALL, device=SLOW, assumptions=Assumptions()):  # noqa: B008
    return Step(pieces(shape, layout, device, assumptions), layout, device.memory, assumptions)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (LAYOUT, SMALL),
        (dataclasses.replace(LAYOUT, expert=4), EXPERTS),
        (dataclasses.replace(LAYOUT, virtual=2), SMALL),
        (dataclasses.replace(LAYOUT, data=2, context=2), SMALL),
        (dataclasses.replace(LAYOUT, recompute=False), SMALL),
        (Layout(tensor=1, sequence_parallel=False, global_batch=2), SMALL),
    ],
)
def test_profiles_are_consistent_and_planned_correctly(layout, shape, tmp_path):
    step = made(layout, shape)
    for stage in range(layout.pipeline):
        profile, served = step.profile(stage)
        # The stage's operators and windows, with what isn't served, are the step.
        assert profile.compute_seconds == pytest.approx(step.compute_seconds[stage])
        assert profile.compute_seconds + profile.window_seconds == pytest.approx(
            step.step_seconds - step.pieces.reduce[stage][1], rel=0.02
        )
        assert len(served) == sum(1 for s in profile.steps if s.__class__.__name__ == "Window")
        assert max(profile.memory.in_use) < profile.memory.capacity
        for mode in ("piggyback", "full"):
            budget = 2 << 30
            verify(profile, plan(profile, budget, mode), budget)
    assert Profile.load(profile.save(tmp_path / "profile.json")) == profile


def test_modes_are_ordered_and_naive_is_the_compute():
    result = simulate(SMALL, LAYOUT, SLOW, PAPER)
    naive, piggyback, coarse, full = (
        result.modes[m].overhead for m in ("naive", "piggyback", "coarse", "full")
    )
    assert naive > piggyback >= coarse >= full > 0
    # Bubbles grow with the work, so naive costs more than the share of time that computes.
    assert naive >= 1 - result.step.idle_share - 0.01
    assert naive < 1
    assert piggyback == pytest.approx(naive / 2, rel=0.25)
    assert result.modes["naive"].gain_vs_naive == 0
    for mode in result.modes.values():
        assert (1 + mode.overhead) * (1 + mode.gain_vs_naive) == pytest.approx(1 + naive)
        assert sum(mode.shares.values()) == pytest.approx(1)
        assert mode.floor <= 1


def test_more_windows_cost_no_more():
    narrow = simulate(SMALL, LAYOUT, SLOW, PAPER, ("full",)).modes["full"].overhead
    beyond = dataclasses.replace(PAPER, bubbles=True, data_windows=True)
    wide = simulate(SMALL, LAYOUT, SLOW, beyond, ("full",)).modes["full"].overhead
    none = dataclasses.replace(PAPER, pipeline_windows=False, intra_use=0.01)
    least = simulate(SMALL, LAYOUT, SLOW, none, ("full",)).modes["full"].overhead
    assert wide <= narrow + 1e-3
    assert least > narrow


def test_async_collectives_shrink_windows():
    exposed = simulate(SMALL, LAYOUT, SLOW, PAPER, ("full",))
    hidden = simulate(SMALL, LAYOUT, SLOW, dataclasses.replace(PAPER, overlap="async"), ("full",))
    assert hidden.step.step_seconds < exposed.step.step_seconds
    assert hidden.step.window_seconds()["tensor"] < exposed.step.window_seconds()["tensor"]
    assert hidden.modes["full"].overhead > exposed.modes["full"].overhead


def test_fingerprints_cost():
    with_them = dataclasses.replace(PAPER, fingerprints=True)
    assert (
        simulate(SMALL, LAYOUT, SLOW, with_them, ("full",)).modes["full"].overhead
        > simulate(SMALL, LAYOUT, SLOW, PAPER, ("full",)).modes["full"].overhead
    )


def test_waiting_for_the_host_hides_nothing():
    plain = simulate(SMALL, LAYOUT, SLOW, PAPER, ("naive", "full"))
    late = simulate(
        SMALL, LAYOUT, SLOW, dataclasses.replace(PAPER, host_gap=1e-3), ("naive", "full")
    )
    assert late.step.idle_share > plain.step.idle_share
    assert any("waits 1 ms for the host" in sentence for sentence in late.said)
    for mode in ("naive", "full"):
        added = [r.modes[mode].step_seconds - r.step.step_seconds for r in (plain, late)]
        assert added[1] == pytest.approx(added[0], rel=0.02)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"does not fit into 4 GiB: stage 0 needs \d+"):
        simulate(SMALL, LAYOUT, dataclasses.replace(SLOW, memory=4 << 30))


def test_search_finds_the_shortest_protected_step():
    base = Layout(global_batch=8)
    found = search(SMALL, base, machine("h200"), 8, PAPER, closely=3)
    assert all(fits(SMALL, one.layout, machine("h200")) for one in found)
    assert all(one.layout.gpus == 8 for one in found)
    best = found[0].protected("full")
    assert best == min(one.protected("full") for one in found if one.simulation)
    # Nothing that was not looked at could have been better.
    assert all(one.unprotected >= best for one in found if not one.simulation)
    with pytest.raises(UsageError, match="no layout"):
        search(SMALL, base, dataclasses.replace(SLOW, memory=1 << 30), 8)


def test_a_measured_profile_gives_its_own_layout_back():
    device = dataclasses.replace(SLOW, launch=0.0, half_rate=0.0)  # nothing that doesn't scale
    step = made(device=device, assumptions=PAPER)
    profiles = [step.profile(stage)[0] for stage in range(2)]
    same = simulate_measured(profiles, {}, PAPER, ("naive", "full"))
    direct = simulate(SMALL, LAYOUT, device, PAPER, ("naive", "full"))
    assert same.step.step_seconds == pytest.approx(direct.step.step_seconds, rel=0.05)
    assert same.modes["naive"].overhead == pytest.approx(direct.modes["naive"].overhead, rel=0.1)
    deeper = simulate_measured(profiles, {"pipeline": 4}, PAPER, ("naive",))
    four = simulate(SMALL, dataclasses.replace(LAYOUT, pipeline=4), device, PAPER, ("naive",))
    assert deeper.step.step_seconds == pytest.approx(four.step.step_seconds, rel=0.15)
    wider = simulate_measured(profiles, {"tensor": 4}, PAPER, ("naive",))
    two = simulate(SMALL, dataclasses.replace(LAYOUT, tensor=4), device, PAPER, ("naive",))
    assert sum(wider.step.compute_seconds) == pytest.approx(sum(two.step.compute_seconds), rel=0.1)
    for changes, words in (({"expert": 2}, "expert 2"), ({"pipeline": 16}, "16 stages for 8")):
        with pytest.raises(UsageError, match=words):
            simulate_measured(profiles, changes, PAPER, ("naive",))


FLAGS = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 "
    "--seq-length 1024 --vocab-size 32000 --swiglu --recompute-granularity full "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 4"
)


def test_command(capsys, tmp_path):
    command = ["simulate", "--megatron-args", FLAGS, "--gpu", "h100", "--memory-gb", "40"]
    assert cli.main([*command, "--json", "--modes", "full", "--sdc-rate", "1e-5"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {"idle_share", "step_s", "layout", "assumptions", "modes"} <= values.keys()
    assert values["modes"].keys() == {"full"}
    assert {"overhead", "gain_vs_naive"} <= values["modes"]["full"].keys()
    assert values["layout"]["microbatches"] == 4
    assert len(values["reliability"]["strategies"]) == 4
    file = tmp_path / "flags"
    file.write_text(FLAGS)
    assert cli.main(["simulate", "--megatron-args", f"@{file}", "--pp", "4", "--search", "8"]) == 0
    text = capsys.readouterr().out
    # Two nodes, so that the stages are joined by the adapters.
    across = [*command, "--tp", "8", "--pp", "2", "--modes", "naive", "--deterministic", "--json"]
    windows = []
    for rate in ("50", "0.2"):
        assert cli.main([*across, "--node-adapter", rate]) == 0
        windows.append(json.loads(capsys.readouterr().out)["windows_s"])
    assert windows[1]["pipeline"] > 10 * windows[0]["pipeline"]
    assert windows[1]["tensor"] == windows[0]["tensor"]
    for words in ("layouts, best of", "idle share", "assumptions", "D-DMR_inter", "vs naive"):
        assert words in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give one of --preset"),
        (["--preset", "nothing"], "--preset nothing"),
        (["--preset", "llama3-70b", "--pp", "1"], "does not fit into 141 GiB"),
        (["--preset", "llama3-70b", "--tp", "3"], "doesn't divide"),
        (["--preset", "llama3-70b", "--window-use", "2"], "--window-use 2"),
        (["--preset", "llama3-70b", "--memory-budget", "much"], "--memory-budget"),
        (["--preset", "llama3-70b", "--node-adapter", "0"], "--node-adapter 0"),
        (["--megatron-args", "@/nowhere"], "@/nowhere"),
    ],
)
def test_wrong_use(flags, words, capsys):
    assert cli.main(["simulate", *flags]) == 2
    assert words in capsys.readouterr().err


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from sparetrain_megatron.simulator.picture import draw

    result = simulate(SMALL, LAYOUT, SLOW, PAPER, ("naive", "full"))
    path = draw(result, tmp_path / "step.svg")
    text = path.read_text()
    assert text.count("<path") > 40
    with pytest.raises(UsageError, match="--picture"):
        draw(result, tmp_path / "step.nothing")


def test_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; import sparetrain_megatron.simulator.commands; "
        "assert not [m for m in sys.modules if m == 'torch' or m.startswith('megatron')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
