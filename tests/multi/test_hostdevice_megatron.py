"""Megatron on the CPU that stands in for a CUDA device, with the flags of an ordinary GPU run."""

import pytest

from tests.harness import succeeded
from tests.megatron_cases import CASES

_models = []


def keep_the_model(rank: int) -> None:
    import megatron.training.training as training

    setup = training.setup_model_and_optimizer

    def setup_and_keep(*args, **kwargs):
        result = setup(*args, **kwargs)
        _models.extend(result[0])
        return result

    training.setup_model_and_optimizer = setup_and_keep


def norm_weights(rank: int) -> dict[str, list[float]]:
    (model,) = _models
    return {
        name: parameter.tolist()
        for name, parameter in model.named_parameters()
        if "layernorm" in name
    }


def prepare_again(rank: int) -> None:
    from sparetrain_megatron import hostdevice

    hostdevice.install()
    hostdevice.prepare_megatron()


def optimizer_class(rank: int) -> str:
    import megatron.core.optimizer as optimizer

    return optimizer.Adam.__module__


def test_norms_stay_equal_under_sequence_parallelism(megatron) -> None:
    """Each rank sees half of the tokens: only the sum over the ranks is the gradient."""
    first, second = succeeded(
        megatron(
            CASES["tp2_sequence_parallel"].argv(), 2, before=keep_the_model, after=norm_weights
        )
    )
    assert first.value == second.value
    assert len(first.value) >= 9
    assert any(len(set(weights)) > 2 for weights in first.value.values()), "nothing was trained"


def test_preparing_twice_is_preparing_once(megatron) -> None:
    flags = CASES["single_bf16"].argv()
    (once,) = succeeded(megatron(flags, 1, after=optimizer_class))
    (twice,) = succeeded(megatron(flags, 1, before=prepare_again))
    assert once.value == "sparetrain_megatron.hostdevice.adam"
    assert (once.losses, once.weights) == (twice.losses, twice.weights)
    assert twice.output.count("the CPU stands in for a CUDA device: ") == 1


def test_the_entry_script_names_the_flag_that_it_leaves_to_others(megatron) -> None:
    flags = [*CASES["single_fp32"].argv(), "--position-embedding-type", "rope"]
    (rank,) = megatron([*flags, "--mtp-num-layers", "1"], 1)
    assert rank.exit_code == 1
    assert "--mtp-num-layers: " in rank.output


@pytest.mark.parametrize(
    "flag", ["--recompute-activations", "--no-create-attention-mask-in-dataloader"]
)
def test_other_flags_of_the_entry_script(megatron, flag: str) -> None:
    plain = succeeded(megatron(CASES["single_fp32"].argv(), 1))
    with_flag = succeeded(megatron([*CASES["single_fp32"].argv(), flag], 1))
    assert plain[0].weights == with_flag[0].weights
