"""The ``"sparetrain"`` block of DeepSpeed's JSON configuration."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, create_model

from ..config import SparetrainConfig
from ..errors import UsageError

SPARETRAIN = "sparetrain"

_Auto = Literal["auto"]

_ELSEWHERE = {"cpu", "second_device_after_mismatch"}
"""Fields that are no setting of the block."""

DeepSpeedSparetrainConfig = create_model(
    "DeepSpeedSparetrainConfig",
    __base__=DeepSpeedConfigModel,
    __doc__="""Sets what is protected, how, and what happens on a mismatch.

    The fields are those of :class:`sparetrain_megatron.config.SparetrainConfig`, and are documented
    and validated there; ``"auto"`` is the default of each but ``enabled``.
    """,
    **{
        name: (field.annotation if name == "enabled" else field.annotation | _Auto, field)
        for name, field in SparetrainConfig.model_fields.items()
        if name not in _ELSEWHERE
    },  # type: ignore[call-overload]
)
DeepSpeedSparetrainConfig.model_config = ConfigDict(
    **{**DeepSpeedConfigModel.model_config, "extra": "forbid"}
)


def spell(field: str) -> str:
    """How a field is written in the JSON."""
    return f"{SPARETRAIN}.{field}"


def get_sparetrain_config(param_dict: dict[str, Any]) -> SparetrainConfig | None:
    """Reads the block.

    Args:
        param_dict: DeepSpeed's whole configuration.

    Returns:
        The configuration; None if there is no block.

    Raises:
        UsageError: One line a problem, each naming the key.
    """
    block = param_dict.get(SPARETRAIN)
    if block is None:
        return None
    if not isinstance(block, dict):
        raise UsageError(f'{SPARETRAIN}: should be an object such as {{"enabled": true}}')
    if "enabled" not in block:
        raise UsageError(f"{spell('enabled')} is missing: should be true or false")
    if not isinstance(block["enabled"], bool):
        raise UsageError(f"{spell('enabled')}: should be true or false, got {block['enabled']!r}")
    if "cpu" in block:
        raise UsageError(
            f"{spell('cpu')}: DeepSpeed chooses the device; "
            "set DS_ACCELERATOR=cpu in the environment"
        )
    values = {name: value for name, value in block.items() if value != "auto"}
    if isinstance(values.get("inject"), str):
        values["inject"] = (values["inject"],)
    return SparetrainConfig.create(values, spell)


def without_guard(param_dict: dict[str, Any], protected: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration without ``"sparetrain": true`` in ``"zero_optimization"``.

    DeepSpeed lets unknown keys pass at the top level, but not in this section: a process in which
    nobody takes the key out, since the plugin is not there, is refused.

    Args:
        protected: There is a configuration from elsewhere.

    Raises:
        UsageError: Protection is asked for, and there is no block that says how.
    """
    section = param_dict.get("zero_optimization")
    if not isinstance(section, dict) or SPARETRAIN not in section:
        return param_dict
    guard = section[SPARETRAIN]
    if not isinstance(guard, bool):
        raise UsageError(
            f"zero_optimization.{SPARETRAIN}: should be true or false, got {guard!r}; the block "
            "itself belongs to the top level"
        )
    if guard and not protected and param_dict.get(SPARETRAIN) is None:
        raise UsageError(
            f'zero_optimization.{SPARETRAIN} is true, but there is no "{SPARETRAIN}" block; add '
            f'"{SPARETRAIN}": {{"enabled": true}} at the top level'
        )
    rest = {name: value for name, value in section.items() if name != SPARETRAIN}
    return {**param_dict, "zero_optimization": rest}
