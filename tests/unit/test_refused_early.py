"""Plans and fault specs that can't be meant are refused before anything is built."""

import pytest
from plan_profiles import pipeline

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import Identity, plan, save_plans
from sparetrain_megatron.planning import check_plan
from sparetrain_megatron.protection import Protection


def protection(**values):
    return Protection(SparetrainConfig(enabled=True, **values))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("iteration=2,rank=4", "rank=4: the job's ranks are 0 to 3"),
        ("iteration=21", "iteration=21: the run ends with iteration 20"),
    ],
)
def test_a_fault_that_can_never_come_about(spec, words):
    run = protection(inject=["iteration=20,rank=3", "random,rate=0.1", spec])
    with pytest.raises(UsageError) as refused:
        run.refuse_faults_outside(4, 20)
    assert str(refused.value) == f"--sparetrain-inject {spec}: {words}"


def test_faults_within_the_run_pass():
    run = protection(inject=["iteration=20,rank=3", "random,rate=0.1", "random,rate=1,rank=0"])
    run.refuse_faults_outside(4, 20)
    run.refuse_faults_outside(4)  # it isn't known when the run ends


@pytest.mark.parametrize("content", [None, "{", '{"kind": "profile", "schema": 1}'])
def test_a_file_that_is_no_plan(tmp_path, content):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"^--sparetrain-plan: .*plan\.json"):
        protection(mode="full", plan=path)


def test_a_plan_of_another_job(tmp_path):
    job = Identity(model={"hidden_size": 64}, layout={"pipeline": 2})
    profiles = [pipeline(stage=s).model_copy(update={"identity": job}) for s in (0, 1)]
    path = save_plans(tmp_path / "plan.json", {p.stage: plan(p, 1 << 30, "full") for p in profiles})
    check_plan(path, "--sparetrain-plan", job, range(2))
    wider = job.model_copy(update={"model": {"hidden_size": 128}})
    with pytest.raises(UsageError, match=r"--sparetrain-plan .*hidden_size: 64, not 128"):
        check_plan(path, "--sparetrain-plan", wider, range(2))
    with pytest.raises(UsageError, match="no plan for pipeline stage 2, only for 0, 1"):
        check_plan(path, "--sparetrain-plan", job, range(4))
