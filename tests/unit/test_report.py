"""Event files, the summary file, and the lines on the terminal."""

import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.report import runs
from sparetrain_megatron.report.events import EventLog, read_events
from sparetrain_megatron.report.summary import Statistics, read_summary, write_summary
from sparetrain_megatron.report.terminal import (
    interval_line,
    mismatch_line,
    print_summary,
    say,
    summary_text,
)

MISMATCH = {
    "iteration": 3,
    "attempt": 1,
    "microbatch": 2,
    "stage": 1,
    "rank": 1,
    "host": "node7",
    "device": "cuda:0 GPU-1234",
    "layer": 4,
    "phase": "backward",
    "operator": "mm",
    "method": "naive",
    "elements_differ": 1,
    "elements": 4096,
    "bits": [14],
    "wrong": "primary",
    "followed_by": 0,
    "note": "",
}


class TestEvents:
    def test_no_event_no_file(self, tmp_path):
        EventLog(tmp_path / "run", 0).close()
        assert not (tmp_path / "run").exists()

    def test_an_event(self, tmp_path):
        log = EventLog(tmp_path / "run", 12)
        log.emit("mismatch", iteration=3, note="größer")
        log.emit("rollback", iteration=3, attempt=1, rank=12)
        first, second = read_events(tmp_path / "run")
        assert first.pop("time") > 1.7e9
        assert first == {
            "schema": 1,
            "kind": "mismatch",
            "rank": 12,
            "iteration": 3,
            "note": "größer",
        }
        assert second["kind"] == "rollback"
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.rank12.jsonl"]

    def test_a_resumed_run_appends(self, tmp_path):
        for iteration in (1, 2):
            EventLog(tmp_path, 0).emit("iteration", iteration=iteration)
        assert [event["iteration"] for event in read_events(tmp_path)] == [1, 2]

    def test_a_line_cut_off_by_a_killed_run_harms_no_other(self, tmp_path):
        EventLog(tmp_path, 0).emit("iteration", iteration=1)
        path = tmp_path / "events.rank0.jsonl"
        path.write_bytes(path.read_bytes() + b'{"schema": 1, "kin')
        EventLog(tmp_path, 0).emit("iteration", iteration=2)
        assert [event["iteration"] for event in read_events(tmp_path)] == [1, 2]

    def test_events_survive_a_sudden_exit(self, tmp_path):
        code = (
            "import os, sys; from sparetrain_megatron.report.events import EventLog; "
            "EventLog(sys.argv[1], 0).emit('warning', message='last words'); os._exit(9)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        assert done.returncode == 9
        assert [event["message"] for event in read_events(tmp_path)] == ["last words"]

    def test_ranks_are_read_in_order(self, tmp_path):
        for rank in (10, 2, 0):
            EventLog(tmp_path, rank).emit("warning", message="")
        assert [event["rank"] for event in read_events(tmp_path)] == [0, 2, 10]

    def test_refusals(self, tmp_path):
        log = EventLog(tmp_path, 0)
        with pytest.raises(ValueError, match="unknown kind"):
            log.emit("mismtach")
        for fields in ({"rank": 1}, {"time": 0}, {"schema": 2}):
            with pytest.raises(ValueError, match="set by the log"):
                log.emit("warning", **fields)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "events.rank0.jsonl").write_text('{"schema": 2, "kind": "warning"}\n')
        with pytest.raises(ValueError, match="schema 2"):
            list(read_events(tmp_path))


counts = st.dictionaries(st.sampled_from(["matmul", "elementwise", "other"]), st.integers(1, 99))
statistics = st.builds(
    Statistics,
    iterations=st.integers(0, 9),
    checks=st.dictionaries(st.sampled_from(["naive", "piggyback"]), counts),
    run_once=counts,
    unprotected=counts,
    reductions_checked=st.integers(0, 9),
    mismatches=st.integers(0, 9),
    rollbacks=st.integers(0, 9),
    seconds_in_checks=st.floats(0, 9),
    peak_bytes_held=st.integers(0, 9),
)


class TestStatistics:
    @given(st.lists(statistics, max_size=4))
    def test_merging_adds_counts_and_keeps_the_largest_of_what_ranks_share(self, parts):
        merged = Statistics.merge(parts)
        assert merged.operators_checked == sum(part.operators_checked for part in parts)
        assert merged.mismatches == sum(part.mismatches for part in parts)
        assert sum(merged.run_once.values()) == sum(sum(p.run_once.values()) for p in parts)
        for name in ("iterations", "rollbacks", "seconds_in_checks", "peak_bytes_held"):
            largest = max((getattr(part, name) for part in parts), default=0)
            assert getattr(merged, name) == largest

    @given(statistics)
    def test_round_trip_and_independence(self, one):
        assert Statistics.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        before = one.to_dict()
        merged = Statistics.merge([one])
        assert merged.to_dict() == before
        merged.count_check("naive", "matmul")
        merged.unprotected["mm"] = 1
        assert one.to_dict() == before

    def test_counting(self):
        one = Statistics()
        one.count_check("naive", "matmul")
        one.count_check("naive", "matmul", 2)
        one.count_check("piggyback", "other")
        assert one.checks == {"naive": {"matmul": 3}, "piggyback": {"other": 1}}
        assert one.operators_checked == 4
        assert one.share_in_checks == 0


class TestSummary:
    def test_write_and_read(self, tmp_path):
        one = Statistics(iterations=5, checks={"naive": {"matmul": 7}})
        config = SparetrainConfig(enabled=True, dir=tmp_path)
        path = write_summary(tmp_path / "run", one, config, world_size=4)
        assert path == tmp_path / "run" / "summary.json"
        summary = read_summary(tmp_path / "run")
        assert summary is not None
        assert (summary["schema"], summary["world_size"]) == (1, 4)
        assert summary["operators_checked"] == 7
        assert SparetrainConfig.model_validate(summary["config"]) == config
        assert Statistics.from_dict(summary) == one
        assert os.listdir(tmp_path / "run") == ["summary.json"]

    def test_a_failed_write_leaves_the_old_one(self, tmp_path, monkeypatch):
        write_summary(tmp_path, Statistics(iterations=1), SparetrainConfig(), 1)

        def fail(descriptor):
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_summary(tmp_path, Statistics(iterations=2), SparetrainConfig(), 1)
        assert read_summary(tmp_path)["iterations"] == 1

    def test_reading_what_is_not_there_or_not_ours(self, tmp_path):
        assert read_summary(tmp_path) is None
        for text in ("{", "[]", '{"schema": 7}'):
            (tmp_path / "summary.json").write_text(text)
            with pytest.raises(ValueError, match=r"summary\.json"):
                read_summary(tmp_path)


class TestRuns:
    def test_a_finished_run_is_set_aside(self, tmp_path):
        assert runs.finished(tmp_path) is None
        EventLog(tmp_path, 0).emit("iteration", iteration=1)
        assert runs.finished(tmp_path) is None  # it was killed: the next one goes on
        for number in (1, 2):
            EventLog(tmp_path, 7).emit("iteration", iteration=number)
            write_summary(tmp_path, Statistics(iterations=number), SparetrainConfig(), 1)
            (tmp_path / "plan.json").write_text("{}")
            (tmp_path / "notes.txt").write_text("not ours")
            target = runs.finished(tmp_path)
            assert target == tmp_path / f"run-{number}"
            runs.set_aside(tmp_path, target)
            assert read_summary(target)["iterations"] == number
            assert [event["iteration"] for event in read_events(target)][-1] == number
            assert (target / "plan.json").exists() and (tmp_path / "notes.txt").exists()
        assert list(read_events(tmp_path)) == []
        assert [path.name for path in runs.earlier(tmp_path)] == ["run-1", "run-2"]

    def test_the_plan_that_is_going_to_be_used_stays(self, tmp_path):
        write_summary(tmp_path, Statistics(), SparetrainConfig(), 1)
        (tmp_path / "plan.json").write_text("{}")
        runs.set_aside(tmp_path, tmp_path / "run-1", tmp_path / "." / "plan.json")
        assert (tmp_path / "plan.json").exists()
        assert [path.name for path in (tmp_path / "run-1").iterdir()] == ["summary.json"]

    def test_runs_after_the_ninth_are_still_in_order(self, tmp_path):
        for number in (10, 9, 2):
            (tmp_path / f"run-{number}").mkdir()
        assert [path.name for path in runs.earlier(tmp_path)] == ["run-2", "run-9", "run-10"]


class OneWrite(io.StringIO):
    """Counts writes: what is written in pieces mixes with other ranks' lines."""

    writes = 0

    def write(self, text):
        self.writes += 1
        return super().write(text)


class TestTerminal:
    def test_mismatch(self):
        assert mismatch_line(MISMATCH) == (
            "MISMATCH rank 1 (node7, cuda:0 GPU-1234), iteration 3, microbatch 2, stage 1, "
            "layer 4, backward, operator mm: 1 of 4,096 elements differs in bit 14; "
            "the primary was wrong [naive]"
        )

    def test_mismatch_of_which_little_is_known(self):
        event = dict.fromkeys(MISMATCH) | {"rank": 0, "iteration": 7, "phase": "communication"}
        assert mismatch_line(event) == "MISMATCH rank 0, iteration 7, communication"
        event |= {"wrong": "unknown", "attempt": 2, "note": "two\nlines"}
        assert mismatch_line(event) == (
            "MISMATCH rank 0, iteration 7, attempt 2, communication; "
            "which of the two was wrong is unknown (two lines)"
        )

    def test_mismatch_of_many(self):
        line = mismatch_line(
            MISMATCH | {"elements_differ": 4096, "bits": list(range(16)), "followed_by": 12}
        )
        assert "; the primary was wrong; 12 more follow from it [naive]" in line
        assert "4,096 of 4,096 elements differ in bits 0, 1, 2, 3, 4, 5, 6, 7, …;" in line

    def test_interval(self):
        one = Statistics(
            checks={"naive": {"matmul": 12345}}, seconds_in_checks=0.412, seconds_total=1.0
        )
        assert interval_line(one) == (
            "12,345 operators checked, 0 mismatches, 0 rollbacks, "
            "time in checks 41.2 % of the iteration"
        )
        assert "1 mismatch, 1 rollback," in interval_line(Statistics(mismatches=1, rollbacks=1))
        # The summary counts all ranks: of one rank's line it has to be said that it is one's.
        assert interval_line(one, 3, 4).startswith("rank 3 of 4 alone: 12,345 operators checked,")

    def test_say_writes_once(self):
        stream = OneWrite()
        say("one\ntwo", stream)
        assert stream.getvalue() == "sparetrain: one\nsparetrain: two\n"
        assert stream.writes == 1

    def test_summary_is_plain_where_there_is_no_terminal(self, tmp_path):
        stream = OneWrite()
        one = Statistics(
            iterations=3,
            checks={"naive": {"matmul": 1200}},
            run_once={"view": 5},
            unprotected={"odd[op]": 1},
            mismatches=2,
            injected=2,
        )
        print_summary(one, world_size=2, directory=tmp_path, stream=stream)
        text = stream.getvalue()
        assert stream.writes == 1
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())
        for expected in ("sparetrain: 2 mismatches", "1,200", "odd[op]", "UNPROTECTED", "view"):
            assert expected in text
        assert str(tmp_path) in text.replace("\n", "").replace(" ", "")

    def test_summary_leaves_out_what_is_empty(self):
        text = summary_text(Statistics())
        assert "no mismatch" in text
        assert "UNPROTECTED" not in text
        assert "injected" not in text
        assert "\x1b" in summary_text(Statistics(), color=True)
