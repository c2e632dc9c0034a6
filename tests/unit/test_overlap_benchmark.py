"""The overlap benchmark: its arithmetic, its link, and that it leaves nothing behind."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.harness import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import overlap
import overlap_rank
import timeline
import two_hosts

sys.path.pop(0)


class TestArguments:
    def test_idle_is_given_in_per_cent(self):
        assert overlap.parse(["--idle", "68"]).idle == pytest.approx(0.68)

    def test_unprotected_is_always_among_the_modes_and_first(self):
        assert overlap.parse(["--modes", "full,naive"]).modes == ["unprotected", "naive", "full"]

    @pytest.mark.parametrize(
        "words", (["--idle", "100"], ["--idle", "0"], ["--steps", "0"], ["--modes", "fast"])
    )
    def test_nonsense_is_refused(self, words, capsys):
        with pytest.raises(SystemExit) as stopped:
            overlap.parse(words)
        assert stopped.value.code == 2
        assert words[0] in capsys.readouterr().err

    def test_enough_iterations_for_everything(self):
        options = overlap.parse(["--steps", "3"])
        words = overlap_rank.arguments(options)
        iterations = int(words[words.index("--train-iters") + 1])
        assert iterations >= 4 + 3 * overlap_rank.CALIBRATIONS + overlap_rank.PROFILED + 5 * len(
            options.modes
        )


class TestCalibration:
    def test_first_guess_spreads_what_is_missing_over_all_transfers(self):
        # Busy for 2 s at 75 % idle makes 8 s, of which 2.4 s are there already.
        assert overlap_rank.first_transfer(2.0, 2.4, 0.75, 16) == pytest.approx(5.6 / 16)

    def test_never_faster_than_possible(self):
        assert overlap_rank.first_transfer(2.0, 9.0, 0.5, 8) > 0
        assert overlap_rank.next_transfer(0.1, 6.0, 5.0, 1.0) > 0

    @pytest.mark.parametrize("idle", (0.5, 0.68, 0.77))
    def test_converges_where_small_transfers_hide_behind_compute(self, idle):
        busy = 2.0

        def step(transfer):
            return 2.3 + 13 * max(0.0, transfer - 0.02) + 3 * transfer

        transfer = overlap_rank.first_transfer(busy, step(0.0), idle, 16)
        for _ in range(overlap_rank.CALIBRATIONS):
            found = 1 - busy / step(transfer)
            if abs(found - idle) <= overlap_rank.TOLERANCE:
                break
            wanted = busy / (1 - idle)
            transfer = overlap_rank.next_transfer(transfer, step(transfer), step(0.0), wanted)
        assert found == pytest.approx(idle, abs=overlap_rank.TOLERANCE)

    def test_one_wrong_measurement_leads_not_far_away(self):
        assert overlap_rank.next_transfer(0.1, 2.001, 2.0, 8.0) == pytest.approx(0.2)
        assert overlap_rank.next_transfer(0.1, 1.9, 2.0, 8.0) == pytest.approx(0.2)
        assert overlap_rank.next_transfer(0.1, 90.0, 2.0, 8.0) == pytest.approx(0.05)


class TestFloor:
    def test_work_before_a_long_enough_window_fits(self):
        assert timeline.unhidden([(1.0, 3.0, 3.0)], [(0.5, 1.5)]) == 0

    def test_work_after_the_last_window_does_not(self):
        assert timeline.unhidden([(1.0, 3.0, 3.0)], [(0.5, 1.5), (4.0, 0.25)]) == 0.25

    def test_early_windows_do_not_help_later_work(self):
        windows = [(0.0, 5.0, 5.0), (8.0, 9.0, 9.0)]
        assert timeline.unhidden(windows, [(7.0, 3.0)]) == 2

    def test_too_much_work_altogether(self):
        windows = [(1.0, 2.0, 2.0), (3.0, 4.0, 4.0)]
        assert timeline.unhidden(windows, [(0.0, 2.0), (2.5, 2.0)]) == 2

    def test_overrun_is_no_window(self):
        assert timeline.unhidden([(1.0, 2.0, 2.5)], [(0.0, 1.5)]) == 0.5

    def test_union(self):
        assert timeline.union([(2, 3), (0, 1), (0.5, 1.5)]) == [(0, 1.5), (2, 3)]


class Commands:
    """Stands for ``subprocess.run``; fails at the command that contains ``failing``."""

    def __init__(self, failing=None):
        self.done, self.failing = [], failing

    def __call__(self, words, **how):
        line = " ".join(words)
        if self.failing and self.failing in line:
            raise subprocess.CalledProcessError(1, words, stderr="not permitted")
        self.done.append(line)

    @property
    def left(self):
        """Namespaces that were added and not deleted."""
        names = [line.split()[-1] for line in self.done if line.startswith("ip netns add")]
        gone = [line.split()[-1] for line in self.done if line.startswith("ip netns del")]
        return sorted(set(names) - set(gone))


@pytest.fixture
def commands(monkeypatch):
    def install(failing=None, absent=()):
        stand_in = Commands(failing)
        monkeypatch.setattr(two_hosts.subprocess, "run", stand_in)
        monkeypatch.setattr(
            two_hosts.shutil, "which", lambda tool: None if tool in absent else f"/sbin/{tool}"
        )
        return stand_in

    return install


class TestNamespaces:
    def test_made_and_removed(self, commands):
        done = commands()
        with two_hosts.hosts("namespaces") as pair:
            assert done.left == sorted(pair.namespaces)
            prefix, environment = pair.launch(1)
            assert prefix == ["ip", "netns", "exec", pair.namespaces[1]]
            assert environment["MASTER_ADDR"] == pair.addresses[0]
            assert environment["GLOO_SOCKET_IFNAME"] == pair.devices[1]
        assert done.left == []

    def test_names_are_this_process_own_and_short_enough(self):
        pair = two_hosts.Namespaces()
        assert all(str(os.getpid()) in name for name in pair.namespaces + pair.devices)
        assert all(len(name) <= 15 for name in pair.devices)

    @pytest.mark.parametrize("failing", ("-1", "link add", "address add", "set lo", "tbf"))
    def test_removed_when_something_fails_on_the_way(self, commands, failing):
        done = commands(failing)
        refused = pytest.raises(two_hosts.LinkError, match="not permitted")
        with refused, two_hosts.hosts("namespaces"):
            pass
        assert done.left == []

    @pytest.mark.parametrize("error", (KeyboardInterrupt, SystemExit, RuntimeError))
    def test_removed_when_the_run_is_left(self, commands, error):
        done = commands()
        with pytest.raises(error), two_hosts.hosts("namespaces"):
            raise error
        assert done.left == []

    @pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
    def test_removed_at_a_signal_and_no_second_one_disturbs(self, commands, number):
        done = commands()
        before = signal.getsignal(number)
        with pytest.raises(SystemExit), two_hosts.hosts("namespaces"):
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
        assert done.left == []
        assert signal.getsignal(number) is before

    def test_says_which_package_is_absent(self, commands):
        commands(absent=("tc",))
        refused = pytest.raises(two_hosts.LinkError, match=r"tc is absent.*iproute2")
        with refused, two_hosts.hosts("namespaces"):
            pass

    def test_emulated_where_not_permitted(self, commands, capsys):
        commands(failing="netns add")
        with two_hosts.hosts("auto") as pair:
            assert pair.kind == "emulated"
        assert "emulated" in capsys.readouterr().out

    def test_rate(self):
        words = two_hosts.shaping("st1-0", 8e6)
        assert words[words.index("rate") + 1] == "8000000bit"
        assert words[:3] == ["tc", "qdisc", "replace"]


class TestEmulatedLink:
    def test_one_transfer_at_a_time_in_each_direction(self):
        link = two_hosts.EmulatedLink()
        link.set_rate(8e6)  # a megabyte a second
        assert link.passes("send", 500_000, 10.0) == pytest.approx(10.5)
        assert link.passes("send", 500_000, 10.1) == pytest.approx(11.0)
        assert link.passes("recv", 500_000, 10.1) == pytest.approx(10.6)

    def test_a_request_completes_when_its_bytes_have_passed(self):
        class Tensor:
            numel = staticmethod(lambda: 25_000)
            element_size = staticmethod(lambda: 2)

        class Request:
            wait = staticmethod(lambda: True)

        link = two_hosts.EmulatedLink()
        issue = link.wrap(lambda **what: {"send_next": Request(), "recv_next": Request()})
        tensors = {"tensor_send_next": Tensor(), "tensor_recv_next": Tensor()}
        assert isinstance(issue(**tensors)["send_next"], Request)  # no rate yet
        link.set_rate(8e6)
        start = time.perf_counter()
        for request in issue(**tensors).values():
            assert request.wait()
        assert time.perf_counter() - start >= 0.05


class TestProcesses:
    def test_a_failed_rank_ends_the_run_and_the_other_rank(self):
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        try:
            with pytest.raises(SystemExit, match=r"rank 1 .* 3"):
                two_hosts.wait([sleeping, failing])
        finally:
            two_hosts.stop([sleeping, failing])
        assert sleeping.returncode


def rank(*, naive=0.1, in_windows=0.5, drained=0.1):
    """What one rank writes: two rounds of an 8 s unprotected step and a protected one."""
    nothing = {
        "waiting": 5.0,
        "cpu": 3.0,
        "cpu_in_windows": 0.0,
        "in_checks": 0.0,
        "waited_in_verdicts": 0.0,
        "in_windows": 0.0,
        "overrun": 0.0,
        "windows": 8,
        "longest_overrun": 0.01,
        "by_window": {},
        "by_category": {},
        "outside": {},
        "operators": {},
        "peak_held_bytes": 0,
        "peak_check_bytes": 0,
    }
    protected = nothing | {
        "cpu": 3.2 + in_windows,
        "cpu_in_windows": in_windows,
        "in_checks": naive + drained + 1.0,
        "waited_in_verdicts": 1.0,
        "in_windows": in_windows,
        "by_category": {"naive": naive, "drained": drained, "verdict": 1.0},
        "outside": {"drained": drained},
        "operators": {"window": 90, "drained": 10},
        "peak_held_bytes": 1000,
    }
    steps = [
        {"mode": mode, "round": index, **step, "seconds": seconds}
        for index in range(2)
        for mode, step, seconds in (("unprotected", nothing, 8.0), ("full", protected, 8.4))
    ]
    recorded = {"windows": [(1.0, 2.0, 2.0)], "work": [(0.5, 0.8), (3.0, 0.06)], "operators": {}}
    empty = {"windows": [], "work": [], "operators": {}}
    return {
        "steps": steps,
        "recorded": {"unprotected": {"details": empty}, "full": {"details": recorded}},
        "predicted": {"full": {"overhead": 0.03}},
        "peak_process_bytes": 1 << 30,
    }


class TestSummary:
    @pytest.fixture
    def full(self):
        options = overlap.parse(["--modes", "full", "--steps", "2"])
        found = {"rate": 8e6, "calibration": [], "link": "namespaces", "ranks": [rank(), rank()]}
        result = overlap.summary(found, options)
        assert result["idle_share"] == pytest.approx(5 / 8)
        json.dumps(result)
        overlap.print_table(result)
        return result["modes"]["full"]

    def test_wall_time(self, full):
        assert full["ratio"] == pytest.approx(1.05)
        assert full["ratio_spread"] == pytest.approx([1.05, 1.05])

    def test_waiting_for_the_peer_at_a_verdict_is_not_on_the_critical_path(self, full):
        assert full["critical_path_share"] == pytest.approx(0.2 / 8)
        assert full["busy_growth"] == pytest.approx(0.2 / 8)

    def test_what_the_plan_said(self, full):
        assert full["predicted_share"] == 0.03

    def test_shares(self, full):
        assert full["in_window_share"] == pytest.approx(0.5 / 0.6)
        assert full["naive_share"] == pytest.approx(0.1 / 0.7)
        assert full["peak_held_bytes"] == 1000

    def test_floor_is_naive_work_and_what_fits_in_no_window(self, full):
        assert full["floor"] == pytest.approx((0.1 + 0.06) / 8)


@pytest.mark.slow
@pytest.mark.acceptance
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize("link", ("auto", "emulated"))
def test_runs(tmp_path, link):
    """Two steps of a small model."""
    out = tmp_path / "overlap.json"
    size = "--hidden 128 --layers 2 --sequence 128 --vocabulary 512 --idle 68 --steps 2".split()
    words = [sys.executable, str(ROOT / "benchmarks/overlap.py"), *size, "--link", link]
    subprocess.run([*words, "--json", str(out)], check=True, timeout=900)
    result = json.loads(out.read_text())
    assert 0 < result["idle_share"] < 1
    assert list(result["modes"]) == list(overlap.MODES)
    keys = (
        "ratio ratio_spread critical_path_share in_window_share naive_share peak_held_bytes floor"
    )
    for row in result["modes"].values():
        assert set(keys.split()) <= set(row)
    full = result["modes"]["full"]
    assert 0 < full["in_window_share"] <= 1
    assert full["peak_held_bytes"] > 0
