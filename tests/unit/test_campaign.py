"""Campaigns: drawing faults, and running a few in a real Megatron GPT."""

import json
from collections import Counter

import pytest
import torch

from sparetrain_megatron import cli
from sparetrain_megatron.dmr.position import Position
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.faults import campaign
from sparetrain_megatron.faults.injector import Injector
from sparetrain_megatron.faults.spec import FaultSpec
from sparetrain_megatron.faults.targets import Recorder, Targets, bits_of_class

STEP = [
    (phase, layer, operator, execution)
    for layer in (1, 2)
    for phase, operator, execution in (
        ("forward", "mm", "primary"),
        ("forward", "mm", "checker"),
        ("forward", "add", "only"),
        ("recompute", "add", "only"),
        ("accumulate", "add", "primary"),
        ("clip", "mul", "checker"),
        ("clip", "mul", "primary"),
        ("clip", "_local_scalar_dense", "primary"),
    )
] * 2


def play(injector):
    """What an engine asks of an injector in a step; returns the bits that changed, in order."""
    outputs = []
    for phase, layer, operator, execution in STEP:
        # Some operators of accumulation belong to a layer, others to none.
        if phase == "clip" or (phase == "accumulate" and layer == 2):
            layer = None
        position = Position(iteration=3, phase=phase, layer=layer)
        if operator == "_local_scalar_dense":
            outputs.append(injector.visit_scalar(position, operator, execution, 1.0) != 1.0)
            continue
        tensors = [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(3).int()]
        injector.visit(position, operator, execution, tensors)
        outputs.append(any(t.view(torch.uint8).any() for t in tensors))
    return outputs


@pytest.fixture
def targets():
    recorder = Recorder()
    play(recorder)
    assert len(recorder.visits) == len(STEP)
    return Targets(recorder.visits, iteration=3)


def test_every_fault_hits_what_was_drawn(targets):
    for target in targets.draw(200, "seed"):
        injector = Injector([FaultSpec.parse(target.spec)], 0)
        injector.begin(3, 1)
        assert sum(play(injector)) == 1, target
        (record,) = injector.records
        for key in ("phase", "operator", "dtype"):
            name = {"float": "float64", "int": "int64"}.get(record[key], record[key])
            assert name == getattr(target, key)
        assert record["effect"]
        assert record["layer"] == FaultSpec.parse(target.spec).layer


def test_faults_are_stratified(targets):
    drawn = targets.draw(400, "seed")
    for key, least in (("phase", 4), ("side", 2), ("bit_class", 4), ("operator", 4)):
        counts = Counter(getattr(target, key) for target in drawn)
        assert len(counts) == least, counts
        assert min(counts.values()) >= 40, counts
    both = {(t.phase, t.side) for t in drawn}
    assert ("recompute", "checker") in both
    assert ("forward", "checker") in both
    assert ("recompute", "primary") not in both  # a recompute is the second execution
    assert len({t.spec for t in drawn}) > 200


def test_draws_repeat(targets):
    assert targets.draw(50, "a") == targets.draw(50, "a")
    assert targets.draw(50, "a") != targets.draw(50, "b")
    assert targets.draw(50, "a") == targets.draw(80, "a")[:50]  # a restart goes on with the rest


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, (1, 8, 23, 0)),
        (torch.bfloat16, (1, 8, 7, 0)),
        (torch.float16, (1, 5, 10, 0)),
        (torch.float64, (1, 11, 52, 0)),
        (torch.float8_e4m3fn, (1, 4, 3, 0)),
        (torch.int64, (0, 0, 0, 64)),
        (torch.bool, (0, 0, 0, 1)),
    ],
    ids=str,
)
def test_classes_of_bits(dtype, bits):
    classes = ("sign", "exponent", "mantissa", "integer")
    ranges = [bits_of_class(dtype, c) for c in classes]
    assert tuple(map(len, ranges)) == bits
    positions = sorted(bit for r in ranges for bit in r)
    assert positions == list(range(sum(bits)))


FAULT = {"reached": True, "effect": True, "harmful": True, "reported": True, "error": None}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "harmful caught"),
        ({"reported": False}, "MISSED"),
        ({"harmful": False}, "harmless reported"),
        ({"harmful": False, "reported": False}, "harmless silent"),
        ({"effect": False, "harmful": False, "reported": False}, "no effect"),
        ({"error": "IndexError", "reported": False}, "crashed"),
        ({"reached": False}, "MISSED"),
    ],
)
def test_outcomes(change, outcome):
    assert campaign.outcome_of(FAULT | change) == outcome


def test_after_a_rollback_nothing_may_be_left():
    assert campaign.outcome_of(FAULT, rollback=True) == "MISSED"
    assert campaign.outcome_of(FAULT | {"harmful": False}, rollback=True) == "harmless reported"


class Scripted:
    """Stands in for a worker's process: plays lines, then ends."""

    def __init__(self, runs):
        self.runs, self.orders = list(runs), []

    def __call__(self, order, log):
        log.write_text("some output\nits last words\n")
        self.orders.append(order)
        code, lines = self.runs.pop(0)
        return type("Process", (), {"wait": lambda self: code})(), [json.dumps(x) for x in lines]


PLACE = {"spec": "x", "phase": "clip", "operator": "mul", "dtype": "f", "bit_class": "sign"}
PLACE |= {"side": "primary", "findings": [], "differs": []}
CLEAN = {"kind": "clean", "checks": 10, "alarms": [], "error": None, "differs": []}


def scripted(monkeypatch, tmp_path, *runs):
    """Runs a campaign of two faults whose worker is played."""
    worker = Scripted(runs)
    monkeypatch.setattr(campaign, "_start", worker)
    result = campaign.Campaign(campaign.COVERED[:1], 2, 2, 1, ("bit",), tmp_path)
    result.run(1, lambda: None)
    return result, worker


def test_a_fault_that_kills_its_process_costs_one_fault(monkeypatch, tmp_path):
    trying = {"kind": "trying", "number": 0, **PLACE}
    fault = {"kind": "fault", "number": 1, **PLACE, **FAULT}
    result, worker = scripted(
        monkeypatch, tmp_path, (-11, [trying]), (0, [CLEAN, fault, {"kind": "end"}])
    )
    assert [order.first for order in worker.orders] == [0, 1]
    assert [f["outcome"] for f in result.faults] == ["crashed", "harmful caught"]
    assert "-11" in result.faults[0]["error"]
    assert (result.clean_steps, result.clean_checks) == (1, 10)
    assert not result.failed
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == 2


def test_a_worker_that_fails_by_itself_is_a_failure(monkeypatch, tmp_path):
    result, _ = scripted(monkeypatch, tmp_path, (1, [{"kind": "start"}]))
    assert result.failed
    assert "its last words" in result.problems[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"alarms": ["mm"]}, "FALSE ALARM"), ({"differs": ["loss"]}, "PROBLEM")],
)
def test_clean_steps_must_be_clean(monkeypatch, tmp_path, change, word):
    result, _ = scripted(monkeypatch, tmp_path, (0, [CLEAN | change, {"kind": "end"}]))
    assert result.failed
    assert word in result.text(color=False, width=100)


def test_a_missed_fault_is_a_failure(monkeypatch, tmp_path):
    fault = {"kind": "fault", "number": 0, **PLACE, **FAULT, "reported": False}
    result, _ = scripted(monkeypatch, tmp_path, (0, [fault, {"kind": "end"}]))
    assert result.failed
    assert result.counts("phase")["clip"]["MISSED"] == 1
    assert "MISSED piggyback, bf16, recompute full: x" in result.text(color=False, width=100)
    assert len(result.to_dict()["missed"]) == 1


@pytest.mark.parametrize(
    "argv", [["--patterns", "bit,twist"], ["--faults", "-1"], ["--jobs", "0"]], ids=lambda a: a[0]
)
def test_wrong_values(argv):
    with pytest.raises(UsageError, match=argv[0]):
        campaign.main(argv)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], [setup.name for setup in campaign.COVERED]),
        (["--mode", "naive"], ["naive, bf16, recompute none", "naive, fp32, recompute none"]),
        (["--dtype", "fp32"], ["piggyback, fp32, recompute full"]),
        (["--mode", "full"], [setup.name for setup in campaign.DEFERRED]),
        (["--mode", "full", "--dtype", "bf16"], ["full, bf16, recompute full"]),
        (
            ["--mode", "coarse"],
            [
                "coarse, bf16, recompute full",
                "coarse, fp32, recompute full",
                "coarse, bf16, recompute selective",
                "coarse, bf16, recompute full, single",
                "coarse, fp32, recompute full, single",
            ],
        ),
        (
            ["--recompute", "selective", "--dtype", "bf16"],
            ["piggyback, bf16, recompute selective"],
        ),
    ],
)
def test_configurations(argv, names):
    assert [s.name for s in campaign._setups(campaign._parser().parse_args(argv))] == names


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "bf16", "--recompute", "full"],
        ["--dtype", "fp32", "--on-mismatch", "rollback", "--patterns", "all"],
        ["--mode", "full", "--dtype", "fp32"],
    ],
    ids=["report", "rollback", "full"],
)
def test_a_small_campaign(tmp_path, capsys, flags):
    pytest.importorskip("megatron.training", reason="megatron-core is not installed")
    file, out = tmp_path / "figures.json", tmp_path / "out"
    argv = ["--faults", "40", "--clean-steps", "2", *flags]
    code = cli.main(["campaign", *argv, "--json", str(file), "--out", str(out)])
    text = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert code == 0, text
    assert figures["total"]["injected"] == 40
    assert figures["missed"] == figures["false_alarms"] == figures["problems"] == []
    assert figures["clean_steps"] == 2
    assert figures["clean_checks"] > 1000
    assert {"forward", "recompute", "backward", "accumulate", "clip", "optimizer"} <= set(
        figures["by_phase"]
    )
    faults = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    assert len(faults) == 40
    assert all(fault["reached"] for fault in faults)
    caught = figures["total"]["harmful caught"]
    if "rollback" in flags:
        assert caught == 0  # nothing is left of any of them
        assert figures["total"]["harmless reported"] > 25
    else:
        assert caught > 8
    assert "by operator" in text


@pytest.mark.slow
def test_a_campaign_finds_what_an_engine_overlooks(tmp_path, capsys, monkeypatch):
    """The oracle is independent: with comparisons that always agree, faults are missed."""
    pytest.importorskip("megatron.training", reason="megatron-core is not installed")
    blind = tmp_path / "sitecustomize.py"
    blind.write_text("import sparetrain_megatron.dmr.bits as b\nb.equal = lambda a, b: True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--faults", "12", "--clean-steps", "1", "--dtype", "bf16", "--mode", "naive"]
    assert campaign.main([*argv, "--out", str(tmp_path / "out")]) == 1
    assert "MISSED naive, bf16" in capsys.readouterr().out
