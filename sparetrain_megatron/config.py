"""One configuration; command-line flags, JSON blocks and Python all end here.

The fields' docstrings are the flags' help texts too: field `on_mismatch` is the flag
`--sparetrain-on-mismatch`. This module imports neither torch nor a framework, so that a wrong
flag is reported within a fraction of a second.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from sparetrain_megatron.errors import UsageError

Mode = Literal["naive", "piggyback", "coarse", "full"]
OnMismatch = Literal["rollback", "abort", "report"]

CPU_VARIABLE = "SPARETRAIN_CPU"
PREFIX = "--sparetrain"
NEGATIVE_PREFIX = "--no-sparetrain"

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1 << 10 * (i + 1) for i, letter in enumerate("kmgt")}
_UNITS |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")}


def parse_size(text: str | int, *, total: int | None = None) -> int:
    """Turns a size such as `256MiB`, `4GB`, `4096` or `10%` into bytes.

    Args:
        text: A number with an optional unit (KiB, MiB, GiB, TiB; KB, MB, GB, TB), or a share.
        total: What a share is a share of, in bytes. Without it shares are refused.

    Raises:
        ValueError: Not a size, not positive, or a share outside (0, 100] or without `total`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", str(text))
    if match is None or match[2].lower() not in {*_UNITS, "%"}:
        share = " or 10%" if total is not None else ""
        raise ValueError(f"should be a size such as 256MiB, 4GiB{share}")
    number = float(match[1])
    if match[2] == "%":
        if total is None:
            raise ValueError("should be a size such as 256MiB; a share is not possible here")
        if not 0 < number <= 100:
            raise ValueError("should be a share above 0% and up to 100%")
        return int(total * number / 100)
    size = int(number * _UNITS[match[2].lower()])
    if size < 1:
        raise ValueError("should be at least one byte")
    return size


class SparetrainConfig(BaseModel):
    """What is protected, how, and what happens on a mismatch."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = False
    """Turn protection on."""

    mode: Mode = "full"
    """Which methods may be used: naive runs every operator twice at once; piggyback also takes
    the recompute of activation checkpointing as the second execution of the forward; coarse
    replays segments of transformer blocks in windows of communication; full also defers what lies
    outside of them."""

    strict: bool = True
    """Refuse at start (the default), or only count and report, what cannot be protected."""

    plan: Path | None = None
    """Use this plan (plan.json) of deferred checks instead of profiling; modes coarse and full."""

    profile_iters: int = Field(default=5, ge=1)
    """Number of iterations to profile before a plan is made; modes coarse and full."""

    memory_budget: str | None = None
    """Bytes that deferred checks may hold on a device, such as 4GiB, or 10% of its memory; default:
    what is free when the plan is made. 0: nothing is deferred."""

    on_mismatch: OnMismatch = "rollback"
    """What follows a mismatch: rollback repeats the iteration, abort stops with exit code 75,
    report goes on with the value of the first execution, right or wrong."""

    max_rollbacks: int = Field(default=2, ge=0)
    """How often one iteration may be repeated before the run stops with exit code 76."""

    dir: Path | None = None
    """Where events and summary go; default: sparetrain/ under --save, else in the working
    directory."""

    second_device: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Share (0 to 1) of clean checks that a peer device repeats. After a mismatch a peer always
    repeats the suspect operator, unless this is given as 0."""

    second_device_after_mismatch: bool = True
    """Whether a peer device repeats the suspect operator after a mismatch. Follows from
    `second_device`: false only when that is given as 0."""

    reductions: float = Field(default=1.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Share (0 to 1) of the reductions between ranks that are done a second time; the others
    are counted as reductions_not_doubled."""

    optimizer_chunk: str = "256MiB"
    """Size of the pieces in which the optimizer's state is copied for its second execution."""

    inject: tuple[str, ...] = ()
    """Inject a fault, such as iteration=3,phase=backward,operator=mm,bit=14; may be given
    several times."""

    cpu: bool = False
    """Run on this machine's CPU, which stands in for the GPU of each rank (also:
    SPARETRAIN_CPU=1)."""

    @model_validator(mode="before")
    @classmethod
    def _zero_means_never(cls, data: Any) -> Any:
        # 0 is the default rate as well, so only here, where given and default values can still
        # be told apart, does an explicit 0 turn the check after a mismatch off.
        if isinstance(data, Mapping) and "second_device" in data:
            try:
                never = float(data["second_device"]) == 0
            except (TypeError, ValueError):
                return data  # the field's own validation reports it
            return {"second_device_after_mismatch": not never, **data}
        return data

    @field_validator("memory_budget")
    @classmethod
    def _is_budget(cls, value: str | None) -> str | None:
        if value is not None and value.strip() != "0":
            parse_size(value, total=1 << 40)
        return value

    @field_validator("optimizer_chunk")
    @classmethod
    def _is_size(cls, value: str) -> str:
        parse_size(value)
        return value

    @field_validator("inject")
    @classmethod
    def _are_fault_specs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            from sparetrain_megatron.faults.spec import FaultSpec

            for text in value:
                try:
                    FaultSpec.parse(text)
                except UsageError as error:
                    raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _no_contradictions(self) -> SparetrainConfig:
        if self.on_mismatch == "report" and self.second_device > 0:
            raise ValueError(
                "`on_mismatch` report contradicts `second_device` above 0: a run that only "
                "reports asks no second device; remove one of them"
            )
        # By value: a configuration that was stored with its defaults can be read again.
        fields = type(self).model_fields
        deferral = ("memory_budget", "plan", "profile_iters")
        given = [name for name in deferral if getattr(self, name) != fields[name].default]
        if given and not self.defers:
            raise ValueError(
                f"`{min(given)}` has no effect with `mode` {self.mode}: only coarse and full "
                "defer; remove one of them"
            )
        if self.on_mismatch != "rollback" and self.max_rollbacks != 2:
            raise ValueError(
                f"`max_rollbacks` has no effect with `on_mismatch` {self.on_mismatch}; "
                "remove one of them"
            )
        return self

    @property
    def defers(self) -> bool:
        """Whether checks may wait for windows."""
        return self.mode in ("coarse", "full")

    @property
    def optimizer_chunk_bytes(self) -> int:
        """`optimizer_chunk` in bytes."""
        return parse_size(self.optimizer_chunk)

    def directory(self, save: str | os.PathLike[str] | None = None) -> Path:
        """The folder for events and summary.

        Args:
            save: The framework's checkpoint folder (Megatron's `--save`), if there is one.
        """
        if self.dir is not None:
            return self.dir
        return Path(save) / "sparetrain" if save else Path("sparetrain")

    @classmethod
    def create(
        cls, values: Mapping[str, Any], spell: Callable[[str], str] = str
    ) -> SparetrainConfig:
        """Builds a configuration from plain values, all but unset ones.

        Args:
            values: Field names and values; strings are converted.
            spell: How the user spells a field, for error messages.

        Raises:
            UsageError: One line a problem, each naming the field as `spell` does.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            lines = (_explain(problem, spell) for problem in error.errors())
            raise UsageError("\n".join(lines)) from None

    @classmethod
    def from_namespace(
        cls, args: argparse.Namespace, environ: Mapping[str, str] = os.environ
    ) -> SparetrainConfig:
        """Builds the configuration from parsed flags and the environment.

        Attributes of `args` that don't belong to `add_arguments` are ignored, missing ones count
        as not given.

        Raises:
            UsageError: A flag is wrong, contradicts another, or lacks `--sparetrain`.
        """
        given = {}
        for field, flag in FLAGS.items():
            value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
            if value is not None:
                given[field] = value
        if not given.get("enabled"):
            # The CPU device is of use without protection too: for the run to compare with.
            idle = [
                f"{NEGATIVE_PREFIX}-strict" if (field, value) == ("strict", False) else FLAGS[field]
                for field, value in given.items()
                if field not in ("enabled", "cpu")
            ]
            if idle:
                raise UsageError(
                    f"{', '.join(idle)} given, but protection is off: add {PREFIX} or remove "
                    f"{'it' if len(idle) == 1 else 'them'}"
                )
        if "cpu" not in given:
            given["cpu"] = _switch(CPU_VARIABLE, environ.get(CPU_VARIABLE, ""))
        return cls.create(given, lambda field: FLAGS.get(field, field))


_NO_FLAG = {"second_device_after_mismatch"}
FLAGS: dict[str, str] = {
    field: PREFIX if field == "enabled" else f"{PREFIX}-{field.replace('_', '-')}"
    for field in SparetrainConfig.model_fields
    if field not in _NO_FLAG
}
"""Field name to flag."""

_METAVARS = {
    "mode": "naive|piggyback|coarse|full",
    "plan": "FILE",
    "profile_iters": "N",
    "memory_budget": "SIZE",
    "on_mismatch": "rollback|abort|report",
    "max_rollbacks": "N",
    "dir": "DIR",
    "second_device": "RATE",
    "reductions": "RATE",
    "optimizer_chunk": "SIZE",
    "inject": "SPEC",
}


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the group of `--sparetrain*` flags to `parser` and returns their actions.

    Every default is None, which means "not given", and every value is a plain string, number or
    list: a checkpoint that stores the arguments can be loaded without this package.
    `SparetrainConfig.from_namespace` validates.
    """
    group = parser.add_argument_group("sparetrain", "silent data corruption protection")
    actions = []
    for field, flag in FLAGS.items():
        info = SparetrainConfig.model_fields[field]
        text = " ".join((info.description or "").split()).replace("%", "%%")
        options: dict[str, Any] = {"default": None}
        if info.annotation is not bool and info.default:
            text += f" Default: {info.default}."
        options["help"] = text
        if field == "strict":
            # Makes --no-sparetrain-strict too.
            options["action"] = argparse.BooleanOptionalAction
        elif info.annotation is bool:
            options["action"] = "store_true"
        else:
            options["metavar"] = _METAVARS[field]
            options["action"] = "append" if field == "inject" else "store"
        actions.append(group.add_argument(flag, **options))
    return actions


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and knows nothing but our flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parse_command_line(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[SparetrainConfig, list[str]]:
    """Takes our flags out of a command line that belongs to another program.

    Args:
        argv: Arguments without the interpreter and without this package's own name.
        environ: The environment.

    Returns:
        The configuration, and the arguments that are not ours in their order.

    Raises:
        UsageError: A flag is unknown, lacks its value, or is refused.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    # Megatron's arguments are not known here, so a value that follows a flag is recognised by
    # what the flag is declared to take, not by what argparse makes of the rest.
    known = {name: action for action in add_arguments(parser) for name in action.option_strings}
    ours: list[str] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith((PREFIX, NEGATIVE_PREFIX)):
            rest.append(token)
            continue
        name, equals, _ = token.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{name}: no such flag{hint}")
        ours.append(token)
        takes_value = known[name].nargs != 0
        if takes_value and not equals and tokens and not tokens[0].startswith("--"):
            ours.append(tokens.pop(0))
    return SparetrainConfig.from_namespace(parser.parse_args(ours), environ), rest


def _explain(problem: Any, spell: Callable[[str], str]) -> str:
    """One line for one of pydantic's problems."""
    text = problem["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    text = re.sub(r"`(\w+)`", lambda field: spell(field[1]), text)
    if not problem["loc"]:
        return text
    field = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, SparetrainConfig.model_fields, n=1)
        return f"{spell(field)}: no such setting" + (f"; did you mean {near[0]}?" if near else "")
    got = "" if field in ("inject",) else f", got {problem['input']!r}"
    return f"{spell(field)}: {text}{got}"


def _switch(name: str, text: str) -> bool:
    """Reads an on/off environment variable."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{name}: should be 1 or 0, got {text!r}")
