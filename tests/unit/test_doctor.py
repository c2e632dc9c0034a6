"""`sparetrain doctor`: what it finds in planted jobs, and how it puts findings together."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest

from sparetrain_megatron import cli
from sparetrain_megatron.doctor import commands
from sparetrain_megatron.doctor.cures import cure
from sparetrain_megatron.doctor.diagnosis import Diagnosis, irreproducible, slowest_median
from sparetrain_megatron.doctor.worker import Examination
from sparetrain_megatron.megatron import preflight
from sparetrain_megatron.report.summary import Statistics

CASE = str(Path(__file__).with_name("doctor_case.py"))
FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 5
    --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 64 --eval-iters 0 --eval-interval 1000
    --num-workers 0 --mock-data --swiglu --disable-bias-linear --normalization RMSNorm
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --attention-dropout 0 --hidden-dropout 0 --sparetrain-cpu
""".split()


def doctor(capsys, kinds: str, *flags: str, options: tuple[str, ...] = ("--quick",)):
    """Exit code and findings."""
    code = cli.main(["doctor", "--json", *options, CASE, kinds, *FLAGS, *flags])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_an_unordered_operator_and_its_cure(megatron, capsys, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "1")
    code, found = doctor(capsys, "unordered", *save, options=())
    assert code == 1
    (finding,) = found["irreproducible"]
    assert finding["operator"] == "embedding_dense_backward"
    assert (finding["kind"], finding["phases"]) == ("operator", ["backward"])
    assert finding["cure"].startswith("--deterministic-mode")
    assert finding["cured"] is True
    assert found["refused"] == []
    assert found["unprotected"] == {}
    assert found["operators_checked"] > 1000
    assert found["seconds_plain"] > 0
    assert found["deterministic_cost"] > -1
    assert not list(tmp_path.iterdir()), "nothing is saved"


@pytest.mark.slow
def test_a_recompute_that_differs_and_an_unknown_operator(megatron, capsys) -> None:
    code, found = doctor(capsys, "recompute,custom")
    assert code == 1
    (finding,) = found["irreproducible"]
    assert (finding["operator"], finding["kind"]) == ("_softmax", "software nondeterminism")
    assert list(found["unprotected"]) == ["doctor_case::twice"]
    assert found["seconds_plain"] is None


@pytest.mark.slow
def test_what_would_be_refused(megatron, capsys) -> None:
    code, found = doctor(capsys, "none", "--fp16")
    assert code == 1
    (refusal,) = found["refused"]
    assert (refusal["flag"], refusal["instead"]) == ("--fp16", "use --bf16")
    assert found["operators_checked"] == 0


@pytest.mark.acceptance
def test_nothing_found_on_two_ranks(megatron, capsys) -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--deterministic-mode")
    code, found = doctor(capsys, "none", *flags, options=("--nproc-per-node", "2"))
    assert code == 0, found
    assert found["healthy"]
    assert found["deterministic"]
    assert found["seconds_plain"] > 0
    assert found["seconds_deterministic"] > 0


def test_wrong_use(capsys, tmp_path: Path) -> None:
    assert cli.main(["doctor", "gone.py"]) == 2
    assert "script gone.py doesn't exist" in capsys.readouterr().err
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('of its own')")
    assert cli.main(["doctor", str(script), "--sparetrain-mod", "naive"]) == 2
    assert "--sparetrain-mod: no such flag" in capsys.readouterr().err


def test_a_script_that_fails_or_hangs(megatron, capsys, tmp_path: Path, monkeypatch) -> None:
    logs = {"no": "ValueError: of its own\ntorch.ChildFailedError: x\n"}
    assert commands._last_error(logs["no"]) == "ValueError: of its own"
    assert commands._last_error("sparetrain: error: --x: no\nValueError: y") == "--x: no"
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(100)")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    assert cli.main(["doctor", "--timeout", "1", str(script)]) == 2
    assert "not ended after 1 seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operator", "switch"),
    [
        ("scatter_add_", "--deterministic-mode"),
        ("index_put", "--deterministic-mode"),
        ("embedding_dense_backward", "--deterministic-mode"),
        ("mm", "CUBLAS_WORKSPACE_CONFIG"),
        ("_scaled_dot_product_flash_attention_backward", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        ("fused_attn_bwd", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        ("compiled:bias_swiglu", "--disable-jit-fuser"),
        ("all_reduce", "NCCL_ALGO"),
        ("add", None),
    ],
)
def test_cures(operator: str, switch: str | None) -> None:
    found = cure(operator)
    assert found is None if switch is None else switch in (found or "")


class Stub:
    """As much of a protection as the examination looks at before training."""

    rank = 3

    def __init__(self) -> None:
        self.statistics = Statistics(unprotected={"--hiding": 1, "a::b": 2})
        self.engine = types.SimpleNamespace(flush_counts=lambda: None)

    def end_in_bounded_time(self, code: int) -> None:
        assert code == 0


def test_a_refused_flag_ends_the_examination_and_a_variable_does_not(monkeypatch, tmp_path) -> None:
    def refusal(flag: str, hides: bool = False) -> preflight.Refusal:
        return preflight.Refusal(flag, "why", "instead", lambda args: True, hides)

    examination = Examination(Stub(), tmp_path, 2, 3)
    passing = (refusal("--hiding", hides=True), refusal("NVTE_X"))
    monkeypatch.setattr(preflight, "REFUSALS", passing)
    args = types.SimpleNamespace(deterministic_mode=True)
    assert [r.flag for r in examination._check(args, strict=False)] == ["--hiding"]
    monkeypatch.setattr(preflight, "REFUSALS", (*passing, refusal("--fatal")))
    with pytest.raises(SystemExit) as ended:
        examination._check(args, strict=False)
    assert ended.value.code == 0
    found = json.loads((tmp_path / "doctor.rank3.json").read_text())
    assert [r["flag"] for r in found["refused"]] == ["--hiding", "NVTE_X", "--fatal"]
    assert found["unprotected"] == {"a::b": 2}
    assert found["deterministic_mode"] is True
    assert found["steps"] == 0


def mismatch(operator: str, method: str, **fields):
    return {"operator": operator, "method": method, "rank": 0, "phase": "forward", **fields}


def test_grouping() -> None:
    events = [
        mismatch("mm", "naive"),
        mismatch("mm", "piggyback", phase="recompute", rank=2, followed_by=3),
        mismatch("gelu", "piggyback"),
        mismatch("all_reduce", "reduction"),
    ]
    first, *rest = irreproducible(events, [mismatch("gelu", "piggyback")])
    assert (first.operator, first.kind, first.times, first.ranks) == ("mm", "operator", 5, (0, 2))
    assert first.cured
    assert [(i.operator, i.kind, i.cured) for i in rest] == [
        ("all_reduce", "communication", True),
        ("gelu", "software nondeterminism", False),
    ]
    assert irreproducible(events, None)[0].cured is None


def test_tables_and_costs() -> None:
    assert slowest_median([[9.0, 1.0, 1.2], [9.0, 2.0, 3.0], []]) == 2.5
    assert slowest_median([[4.0]]) == 4.0
    assert slowest_median([[]]) is None
    healthy = Diagnosis(operators_checked=5, seconds_plain=1.0, seconds_deterministic=1.25)
    assert healthy.healthy
    assert healthy.deterministic_cost == 0.25
    assert healthy.tables()[0][0] == "doctor: nothing found"
    refusal = {"flag": "--x", "why": "y", "instead": "z", "hides": True}
    ill = Diagnosis(
        refused=(refusal,),
        irreproducible=irreproducible([mismatch("mm", "naive")], None),
        unprotected={"a::b": 1},
        failed="because",
    )
    titles = [title for title, _ in ill.tables()]
    assert titles[0] == "doctor: 3 kinds found"
    assert titles[1:] == ["refused at start", "two executions differ", "UNPROTECTED"]
    assert ill.to_dict()["healthy"] is False
