"""Plans and fault specs that can't be meant are refused before anything is built."""

from types import SimpleNamespace

import pytest
from plan_profiles import pipeline

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import plan, save_plans
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
    megatron = pytest.importorskip("sparetrain_megatron.megatron.planning")
    args = SimpleNamespace(
        **dict.fromkeys(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
            "seq_length micro_batch_size num_experts bf16 swiglu normalization "
            "position_embedding_type "
            "world_size virtual_pipeline_model_parallel_size tensor_model_parallel_size "
            "expert_model_parallel_size context_parallel_size global_batch_size "
            "recompute_granularity recompute_method recompute_num_layers sequence_parallel "
            "use_distributed_optimizer overlap_grad_reduce".split()
        ),
        pipeline_model_parallel_size=2,
    )
    identity = megatron.identity(args)
    profiles = [pipeline(stage=s).model_copy(update={"identity": identity}) for s in (0, 1)]
    path = save_plans(tmp_path / "plan.json", {p.stage: plan(p, 1 << 30, "full") for p in profiles})
    megatron.check_plan(path, args)
    args.hidden_size = 64
    with pytest.raises(UsageError, match=r"--sparetrain-plan .*hidden_size: None, not 64"):
        megatron.check_plan(path, args)
    args.hidden_size, args.pipeline_model_parallel_size = None, 4
    with pytest.raises(UsageError, match="no plan for pipeline stage 2, only for 0, 1"):
        megatron.check_plan(path, args)
