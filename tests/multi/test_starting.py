"""What is refused at a run's start, and what happens to an earlier run in the same folder."""

import json
from pathlib import Path

import pytest

from tests.megatron_cases import CASES
from tests.protection import protected

CASE = CASES["pp2_full_recompute"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("iteration=1,rank=2", "rank=2: the job's ranks are 0 to 1"),
        ("iteration=99", "iteration=99: the run ends with iteration"),
    ],
)
def test_faults_outside_of_the_run_are_refused(megatron, tmp_path: Path, spec, words) -> None:
    run = protected(CASE.argv(), 2, tmp_path, inject=[spec])
    assert all(code not in (0, None) for code in run.exit_codes)
    assert any(f"--sparetrain-inject {spec}: {words}" in r.output for r in run.ranks)
    assert not list(tmp_path.glob("events.*"))


def test_runs_in_one_folder_are_kept_apart(megatron, tmp_path: Path) -> None:
    fault = ["iteration=2,rank=1,phase=backward,operator=mm,bit=20"]
    protected(CASE.argv(), 2, tmp_path, inject=fault)
    clean = protected(CASE.argv(), 2, tmp_path)
    assert clean.summary["mismatches"] == 0 and not clean.of_kind("mismatch")
    before = json.loads((tmp_path / "run-1" / "summary.json").read_text())
    assert before["mismatches"] > 0
    assert (tmp_path / "run-1" / "events.rank1.jsonl").read_text().count('"mismatch"') > 0
    assert any("has a finished run: its files are now in" in rank.output for rank in clean.ranks)
