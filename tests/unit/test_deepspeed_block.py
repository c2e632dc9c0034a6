"""The ``"sparetrain"`` block of DeepSpeed's JSON."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.errors import UsageError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def parse(block: Any) -> SparetrainConfig | None:
    from sparetrain_megatron.deepspeed.block import get_sparetrain_config

    return get_sparetrain_config({"sparetrain": block, "train_batch_size": 8})


def test_fields_are_those_of_the_configuration() -> None:
    config = parse({"enabled": True, "mode": "naive", "max_rollbacks": 5, "inject": "iteration=3"})
    assert config == SparetrainConfig(
        enabled=True, mode="naive", max_rollbacks=5, inject=("iteration=3",)
    )


def test_auto_is_the_default() -> None:
    names = [n for n in SparetrainConfig.model_fields if n not in ("enabled", "cpu")]
    assert parse({"enabled": True, **dict.fromkeys(names, "auto")}) == SparetrainConfig(
        enabled=True
    )


def test_no_block() -> None:
    from sparetrain_megatron.deepspeed.block import get_sparetrain_config

    assert get_sparetrain_config({"train_batch_size": 8}) is None


@pytest.mark.parametrize(
    "block, message",
    [
        ({"enabled": "auto"}, "sparetrain.enabled: should be true or false"),
        ({"mode": "naive"}, "sparetrain.enabled is missing"),
        (
            {"enabled": True, "max_rollback": 3},
            "sparetrain.max_rollback: no such setting; did you mean max_rollbacks?",
        ),
        ({"enabled": True, "mode": "fast"}, "sparetrain.mode"),
        ({"enabled": True, "inject": ["phase=sideways"]}, "sparetrain.inject"),
        ({"enabled": True, "cpu": True}, "DS_ACCELERATOR"),
        (True, "should be an object"),
    ],
)
def test_mistakes_name_the_key(block: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(block)
    assert message in str(error.value)


def test_every_field_is_documented() -> None:
    from sparetrain_megatron.deepspeed.block import DeepSpeedSparetrainConfig

    for name, field in DeepSpeedSparetrainConfig.model_fields.items():
        assert field.description, name
