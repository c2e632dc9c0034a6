"""Flags, their validation, and the errors a user sees."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparetrain_megatron.config import (
    FLAGS,
    SparetrainConfig,
    add_arguments,
    parse_command_line,
    parse_size,
)
from sparetrain_megatron.errors import UsageError


def parse(line: str, **environ: str) -> SparetrainConfig:
    return parse_command_line(line.split(), environ)[0]


def refusal(line: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(line, **environ)
    return str(caught.value)


def test_defaults():
    config = parse("--sparetrain")
    assert config == SparetrainConfig(enabled=True)
    assert (config.mode, config.strict, config.on_mismatch) == ("full", True, "rollback")
    assert (config.max_rollbacks, config.reductions) == (2, 1.0)
    assert config.optimizer_chunk_bytes == 256 * 2**20
    assert not parse("pretrain_gpt.py --lr 1").enabled


def test_every_flag():
    config = parse(
        "--sparetrain --sparetrain-mode=full --no-sparetrain-strict --sparetrain-max-rollbacks 0 "
        "--sparetrain-plan plan.json --sparetrain-profile-iters 3 --sparetrain-memory-budget=4GiB "
        "--sparetrain-dir out --sparetrain-second-device 0.25 --sparetrain-reductions=0.5 "
        "--sparetrain-optimizer-chunk 1MiB --sparetrain-cpu "
        "--sparetrain-inject iteration=3,phase=backward --sparetrain-inject=iteration=4,bit=2"
    )
    assert config.model_dump() == {
        "enabled": True,
        "mode": "full",
        "strict": False,
        "plan": Path("plan.json"),
        "profile_iters": 3,
        "memory_budget": "4GiB",
        "on_mismatch": "rollback",
        "max_rollbacks": 0,
        "dir": Path("out"),
        "second_device": 0.25,
        "second_device_after_mismatch": True,
        "reductions": 0.5,
        "optimizer_chunk": "1MiB",
        "inject": ("iteration=3,phase=backward", "iteration=4,bit=2"),
        "cpu": True,
    }
    assert SparetrainConfig.model_validate(config.model_dump()) == config


def test_frozen_and_documented():
    config = SparetrainConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.mode = "naive"  # type: ignore[misc]
    for name, field in SparetrainConfig.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--sparetrain-mode fast", ["--sparetrain-mode", "'naive'", "'full'", "'fast'"]),
        ("--sparetrain-max-rollbacks -1", ["--sparetrain-max-rollbacks", "0", "'-1'"]),
        ("--sparetrain-max-rollbacks two", ["--sparetrain-max-rollbacks", "integer"]),
        ("--sparetrain-second-device 1.5", ["--sparetrain-second-device", "1", "'1.5'"]),
        ("--sparetrain-second-device nan", ["--sparetrain-second-device", "finite"]),
        ("--sparetrain-reductions=-0.1", ["--sparetrain-reductions", "0"]),
        ("--sparetrain-reductions often", ["--sparetrain-reductions", "number"]),
        ("--sparetrain-optimizer-chunk 10%", ["--sparetrain-optimizer-chunk", "256MiB"]),
        ("--sparetrain-optimizer-chunk big", ["--sparetrain-optimizer-chunk", "'big'"]),
        ("--sparetrain-on-mismatch panic", ["--sparetrain-on-mismatch", "'abort'"]),
        ("--sparetrain-inject iteration=x", ["--sparetrain-inject", "iteration"]),
        ("--sparetrain-inject colour=red", ["--sparetrain-inject", "colour"]),
        (
            "--sparetrain-plan p.json --sparetrain-mode piggyback",
            ["--sparetrain-plan has no effect", "piggyback"],
        ),
        (
            "--sparetrain-profile-iters 3 --sparetrain-mode piggyback",
            ["--sparetrain-profile-iters has no effect", "piggyback"],
        ),
        (
            "--sparetrain-memory-budget 4GiB --sparetrain-mode naive",
            ["--sparetrain-memory-budget has no effect", "--sparetrain-mode naive", "coarse"],
        ),
        (
            "--sparetrain-mode full --sparetrain-profile-iters 0",
            ["--sparetrain-profile-iters", "greater than or equal to 1", "'0'"],
        ),
        (
            "--sparetrain-mode full --sparetrain-memory-budget 4GiBs",
            ["--sparetrain-memory-budget", "256MiB", "10%", "'4GiBs'"],
        ),
        (
            "--sparetrain-mode coarse --sparetrain-memory-budget 120%",
            ["--sparetrain-memory-budget", "share"],
        ),
        ("--sparetrain-mode", ["--sparetrain-mode", "expected one argument"]),
        ("--sparetrain-mode --lr 1", ["--sparetrain-mode", "expected one argument"]),
        ("--sparetrain-cpu=yes", ["--sparetrain-cpu"]),
        (
            "--sparetrain-on-mismatch report --sparetrain-second-device 0.1",
            ["--sparetrain-on-mismatch report", "--sparetrain-second-device"],
        ),
        (
            "--sparetrain-on-mismatch abort --sparetrain-max-rollbacks 4",
            ["--sparetrain-on-mismatch abort", "--sparetrain-max-rollbacks"],
        ),
    ],
)
def test_refused_values_name_the_flag(line, expected):
    message = refusal(f"--sparetrain {line}")
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_several_problems_are_told_at_once():
    message = refusal("--sparetrain --sparetrain-mode x --sparetrain-max-rollbacks -3")
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "--sparetrain-mode",
        "--sparetrain-max-rollbacks",
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("--sparetrain-mod", "--sparetrain-mode"),
        ("--sparetrain-injekt", "--sparetrain-inject"),
        ("--sparetrain-secnd-device", "--sparetrain-second-device"),
        ("--no-sparetrain-strickt", "--no-sparetrain-strict"),
        ("--sparetrains", "--sparetrain"),
    ],
)
def test_unknown_flag_suggests_the_nearest(name, nearest):
    assert refusal(f"--sparetrain {name} x").endswith(
        f"{name}: no such flag; did you mean {nearest}?"
    )


@pytest.mark.parametrize(
    "flag",
    ["--sparetrain-mode naive", "--no-sparetrain-strict", "--sparetrain-inject iteration=1"],
)
def test_flags_without_protection_are_refused(flag):
    message = refusal(flag)
    assert flag.split()[0] in message
    assert "protection is off" in message


def test_cpu_needs_no_protection_and_has_a_variable():
    assert parse("--sparetrain-cpu").cpu
    assert parse("", SPARETRAIN_CPU="1").cpu
    assert not parse("", SPARETRAIN_CPU="0").cpu
    assert not parse("").cpu
    assert "SPARETRAIN_CPU" in refusal("", SPARETRAIN_CPU="maybe")


def test_second_device_after_a_mismatch():
    never = parse("--sparetrain --sparetrain-second-device 0")
    sometimes = parse("--sparetrain --sparetrain-second-device 0.5")
    unset = parse("--sparetrain")
    assert (never.second_device, never.second_device_after_mismatch) == (0, False)
    assert (sometimes.second_device, sometimes.second_device_after_mismatch) == (0.5, True)
    assert (unset.second_device, unset.second_device_after_mismatch) == (0, True)
    assert not SparetrainConfig(second_device=0).second_device_after_mismatch
    assert SparetrainConfig.model_validate(unset.model_dump()) == unset


@pytest.mark.parametrize("mode", ["naive", "piggyback", "coarse", "full"])
def test_modes(mode):
    config = parse(f"--sparetrain --sparetrain-mode {mode}")
    assert config.mode == mode
    assert config.defers == (mode in ("coarse", "full"))


@pytest.mark.parametrize("mode", ["coarse", "full"])
@pytest.mark.parametrize("budget", ["0", " 0 ", "64KiB", "4GiB", "10%", "4096"])
def test_memory_budget(mode, budget):
    config = parse_command_line(
        ["--sparetrain", "--sparetrain-mode", mode, "--sparetrain-memory-budget", budget], {}
    )[0]
    assert config.memory_budget == budget
    assert config.plan is None
    assert config.profile_iters == 5


def test_directory():
    assert SparetrainConfig().directory() == Path("sparetrain")
    assert SparetrainConfig().directory("ckpt") == Path("ckpt/sparetrain")
    assert SparetrainConfig(dir="here").directory("ckpt") == Path("here")


def test_settings_without_a_command_line():
    with pytest.raises(UsageError, match=r"^mod: no such setting; did you mean mode\?$"):
        SparetrainConfig.create({"mod": "naive"})
    with pytest.raises(UsageError, match=r"^max_rollbacks has no effect with on_mismatch report"):
        SparetrainConfig.create({"on_mismatch": "report", "max_rollbacks": 3})


def test_in_another_parser():
    """As in a Megatron-LM checkout, whose own parser holds the flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    add_arguments(parser)
    args = parser.parse_args("--lr 0.1 --sparetrain --no-sparetrain-strict".split())
    assert SparetrainConfig.from_namespace(args, {}) == SparetrainConfig(enabled=True, strict=False)
    assert all(
        isinstance(value, (str, int, float, list, type(None))) for value in vars(args).values()
    )
    args = parser.parse_args(["--lr", "0.1"])
    assert SparetrainConfig.from_namespace(args, {}) == SparetrainConfig()
    assert SparetrainConfig.from_namespace(argparse.Namespace(lr=1), {}) == SparetrainConfig()


def test_help_tells_every_flag():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    for field, flag in FLAGS.items():
        assert f"{flag} " in text or f"{flag}\n" in text or f"{flag}," in text, field


# Another program's tokens: anything that doesn't begin like ours.
foreign = st.lists(
    st.text(min_size=1, max_size=12).filter(
        lambda token: not token.startswith(("--sparetrain", "--no-sparetrain"))
    ),
    max_size=5,
)


@given(foreign, foreign, foreign)
def test_foreign_arguments_pass_untouched(before, between, after):
    ours = ["--sparetrain-mode", "naive"]
    config, rest = parse_command_line([*before, "--sparetrain", *between, *ours, *after], {})
    assert rest == before + between + after
    assert config == SparetrainConfig(enabled=True, mode="naive")


@given(st.integers(1, 10**6), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "kb", "MB"]))
def test_parse_size(number, unit):
    factors = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kb": 1000, "MB": 10**6}
    assert parse_size(f"{number}{unit}") == number * factors[unit]
    assert parse_size(f" {number} {unit} ") == number * factors[unit]


@given(st.text(max_size=8))
def test_parse_size_gives_a_size_or_a_clear_error(text):
    try:
        assert parse_size(text, total=1000) >= 0
    except ValueError as error:
        assert str(error).startswith("should be")


def test_parse_size_shares_and_refusals():
    assert parse_size("10%", total=2000) == 200
    assert parse_size("0.5GiB") == 2**29
    assert parse_size(4096) == 4096
    for text in ("10%", "0", "-1MiB", "4GiBs", "", "1e3", "GiB"):
        with pytest.raises(ValueError, match="should be"):
            parse_size(text)
    for text in ("0%", "101%"):
        with pytest.raises(ValueError, match="share"):
            parse_size(text, total=100)


def test_wrong_flags_are_found_without_torch():
    code = (
        "import sys; from sparetrain_megatron.config import parse_command_line as p; "
        "p(['--sparetrain', '--sparetrain-inject', 'iteration=2']); "
        "import sparetrain_megatron.launcher, sparetrain_megatron.cli; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("0", 0),
        (" 0 ", 0),
        ("64KiB", 1 << 16),
        ("1MiB", 1 << 20),
        ("50%", 4 << 30),
        (None, 1 << 30),
    ],
)
def test_budget_on_a_cpu(budget, expected):
    torch = pytest.importorskip("torch")
    from sparetrain_megatron.planning import budget_bytes

    config = SparetrainConfig(mode="full", memory_budget=budget)
    assert budget_bytes(config, torch.device("cpu")) == expected
