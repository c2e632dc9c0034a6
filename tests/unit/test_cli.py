"""The command `sparetrain`."""

import json
import sys
import types

import pytest

from sparetrain_megatron import __version__, cli, faults
from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.report.events import EventLog
from sparetrain_megatron.report.summary import Statistics, write_summary


@pytest.fixture
def run(tmp_path):
    """The folder of a run on two ranks: three mismatches, two rollbacks."""
    place = {
        "host": "node7",
        "device": "cuda:1",
        "phase": "backward",
        "method": "naive",
        "layer": 4,
    }
    for rank in (0, 1):
        log = EventLog(tmp_path, rank)
        if rank == 1:
            for iteration in (2, 2, 5):
                log.emit("mismatch", iteration=iteration, operator="mm", wrong="primary", **place)
        for iteration in (2, 5):
            log.emit("rollback", iteration=iteration, attempt=1)
        log.emit("warning", message="mode full is not available")
    statistics = Statistics(
        iterations=9,
        checks={"naive": {"matmul": 1234}},
        run_once={"view": 5},
        unprotected={"odd": 3},
        mismatches=3,
        rollbacks=2,
    )
    write_summary(tmp_path, statistics, SparetrainConfig(enabled=True), world_size=2)
    return tmp_path


def test_report(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = [line.split() for line in text.splitlines()]
    for expected in (
        ["1", "node7", "cuda:1", "4", "backward", "mm", "naive", "3", "2,", "5", "primary", "3"],
        ["2", "1", "1"],
        ["5", "1", "1"],
        ["naive", "matmul", "1,234"],
        ["view", "5"],
        ["odd", "3"],
        ["mode", "full", "is", "not", "available"],
    ):
        assert expected in lines, text


def test_report_as_json(run, capsys):
    assert cli.main(["report", "--json", str(run)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["summary"]["operators_checked"] == 1234
    assert report["suspects"] == [
        {
            "rank": 1,
            "host": "node7",
            "device": "cuda:1",
            "layer": 4,
            "phase": "backward",
            "operator": "mm",
            "method": "naive",
            "count": 3,
            "wrong": {"primary": 3},
            "iterations": [2, 5],
        }
    ]
    assert len(report["mismatches"]) == 3
    assert report["rollbacks"] == [
        {"iteration": 2, "attempt": 1, "times": 1},
        {"iteration": 5, "attempt": 1, "times": 1},
    ]
    assert report["warnings"] == ["mode full is not available"]


def test_report_of_a_run_that_was_killed(run, capsys):
    (run / "summary.json").unlink()
    assert cli.main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "has not ended regularly" in " ".join(text.split())
    assert "node7" in text


@pytest.mark.parametrize("name", ["gone", "empty", "broken"])
def test_report_of_nothing(tmp_path, capsys, name):
    if name != "gone":
        (tmp_path / name).mkdir()
    if name == "broken":
        (tmp_path / name / "summary.json").write_text("{")
    assert cli.main(["report", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparetrain: error: ")
    assert err.count("\n") == 1
    assert name in err


def test_campaign_gets_its_arguments(monkeypatch):
    seen = []
    stub = types.ModuleType("sparetrain_megatron.faults.campaign")
    stub.main = lambda argv: seen.append(argv) or 1
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(faults, "campaign", stub, raising=False)
    assert cli.main(["campaign", "--json", "--faults", "3"]) == 1
    assert seen == [["--json", "--faults", "3"]]


def test_campaigns_errors_are_told(monkeypatch, capsys):
    def main(argv):
        raise UsageError("--faults: should be above 0")

    stub = types.ModuleType("sparetrain_megatron.faults.campaign")
    stub.main = main
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(faults, "campaign", stub, raising=False)
    assert cli.main(["campaign"]) == 2
    assert capsys.readouterr().err == "sparetrain: error: --faults: should be above 0\n"


def test_help_and_version(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert "campaign" in text
    assert "report" in text
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sparetrain {__version__}\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["repord", "x"])
    assert caught.value.code == 2
