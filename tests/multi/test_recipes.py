"""The recipes: their flags as Megatron reads them at full size, and the same scripts made small."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sparetrain_megatron.report.events import read_events
from sparetrain_megatron.report.summary import read_summary
from tests.harness import ROOT

EXAMPLES = ROOT / "examples"
VARIANTS = [
    ("llama3_70b", "80"),
    ("llama3_70b", "94"),
    ("llama3_70b", "141"),
    ("llama4_scout", "94"),
    ("llama4_scout", "141"),
    ("mistral_large", "80"),
    ("mistral_large", "94"),
    ("mistral_large", "141"),
]
SIZES = {
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--seq-length",
    "--max-position-embeddings",
    "--num-experts",
    "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--pipeline-model-parallel-layout",
    "--expert-model-parallel-size",
    "--micro-batch-size",
    "--global-batch-size",
    "--train-iters",
    "--vocab-size",
    # Of torchrun.
    "--nnodes",
    "--nproc-per-node",
}


def train(
    recipe: str, *arguments: str, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    unset = ("DATA_PATH", "TOKENIZER_MODEL", "SAVE", "PRETRAIN_SCRIPT", "SPARETRAIN_CPU")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [str(EXAMPLES / recipe / "train.sh"), *arguments],
        env={**inherited, "PYTHON": sys.executable, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def command_line(recipe: str, *arguments: str, **environment: str) -> list[str]:
    run = train(recipe, *arguments, "--print", **environment)
    assert run.returncode == 0, run.stdout
    return run.stdout.splitlines()


def flags(command: list[str]) -> dict[str, list[str]]:
    """Every flag and its values; of those given twice the last."""
    found: dict[str, list[str]] = {}
    name = ""
    for token in command:
        if token.startswith("-"):
            name = token
            found[name] = []
        elif name:
            found[name].append(token)
    return found


@pytest.mark.parametrize(("recipe", "memory"), VARIANTS)
def test_smoke_changes_sizes_and_nothing_else(recipe: str, memory: str) -> None:
    full, small = (flags(command_line(recipe, memory, *extra)) for extra in ([], ["--smoke"]))
    assert full.keys() == small.keys()
    changed = {name for name in full if full[name] != small[name]}
    assert changed <= SIZES
    assert "--sparetrain" in full


def test_unknown_memory_and_own_flags() -> None:
    run = train("llama4_scout", "80")
    assert run.returncode == 2
    assert "no layout for 80 GB" in run.stdout
    assert flags(command_line("llama4_scout", "94", "--lr", "1"))["--lr"] == ["1"]
    own = flags(command_line("mistral_large", "94", DATA_PATH="d", TOKENIZER_MODEL="t", SAVE="s"))
    assert own["--data-path"] == ["d"]
    assert own["--save"] == own["--load"] == ["s"]
    assert "--mock-data" not in own


READ = """
import json, os, sys

from sparetrain_megatron import hostdevice
hostdevice.install()
hostdevice.prepare_megatron()
from megatron.training import arguments
from sparetrain_megatron.megatron.preflight import check

shapes = []
for world_size, argv in json.load(sys.stdin):
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *argv]
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = args.vocab_size
    check(args, strict=True)
    config = arguments.core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
             "num_query_groups", "num_moe_experts", "no_rope_freq", "moe_router_topk",
             "moe_router_score_function", "moe_apply_probs_on_input", "qk_l2_norm",
             "add_bias_linear", "deterministic_mode")
    shapes.append({name: getattr(config, name) for name in names} | {
        "vocab": args.padded_vocab_size, "data_parallel": args.data_parallel_size,
        "stages": layout and [sum(kind.name == "decoder" for kind in part)
                              for stage in layout.layout for part in stage]})
print(json.dumps(shapes))
"""


def test_megatron_accepts_the_full_sizes(megatron) -> None:
    """Megatron's own checks of flags and layouts, and ours of what can be protected."""
    cases = []
    for recipe, memory in VARIANTS:
        command = command_line(recipe, memory)
        found = flags(command)
        world = int(found["--nnodes"][0]) * int(found["--nproc-per-node"][0])
        start = next(i for i, token in enumerate(command) if token.endswith("pretrain_gpt.py"))
        cases.append((world, _without_ours(command[start + 1 :])))
    run = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    shapes = dict(zip(VARIANTS, json.loads(run.stdout.splitlines()[-1])))
    expected = {
        "llama3_70b": (80, 8192, 28672, 64, 8, None, 128256),
        "mistral_large": (88, 12288, 28672, 96, 8, None, 32768),
        "llama4_scout": (48, 5120, 8192, 40, 8, 16, 202048),
    }
    for (recipe, _), shape in shapes.items():
        names = (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("num_query_groups", "num_moe_experts", "vocab"),
        )
        assert tuple(shape[name] for name in names) == expected[recipe]
        assert shape["deterministic_mode"]
        assert not shape["add_bias_linear"]
    assert shapes["llama3_70b", "80"]["stages"] == [27, 27, 26]
    assert [shapes["mistral_large", m]["data_parallel"] for m in ("80", "94", "141")] == [1, 1, 2]
    scout = shapes["llama4_scout", "94"]
    assert scout["no_rope_freq"] == [0, 0, 0, 1] * 12
    assert scout["qk_l2_norm"]
    assert scout["moe_apply_probs_on_input"]
    assert (scout["moe_router_topk"], scout["moe_router_score_function"]) == (1, "sigmoid")


def _without_ours(argv: list[str]) -> list[str]:
    from sparetrain_megatron.config import parse_command_line

    return parse_command_line(argv, environ={})[1]


@pytest.mark.parametrize("recipe", sorted({recipe for recipe, _ in VARIANTS}))
def test_slurm_starts_a_task_on_each_node(tmp_path: Path, recipe: str) -> None:
    """With stand-ins for Slurm's own commands."""
    for name, body in (
        ("scontrol", "echo node7; echo node8"),
        ("srun", 'shift; SLURM_NODEID=1 exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    unset = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "DATA_PATH", "SAVE")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    run = subprocess.run(
        ["bash", str(EXAMPLES / recipe / "train.sbatch"), "94", "--print"],
        env={
            **inherited,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_SUBMIT_DIR": str(EXAMPLES / recipe),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = flags(run.stdout.splitlines())
    assert found["--master-addr"] == ["node7"]
    assert found["--master-port"] == ["23456"]
    assert found["--node-rank"] == ["1"]
    assert found["--nnodes"] == ["4"]


SMOKES = [
    pytest.param("mistral_large", "94", 2),
    pytest.param("llama3_70b", "80", 3, marks=pytest.mark.acceptance),
    pytest.param("llama3_70b", "94", 4),
    pytest.param("llama4_scout", "94", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "memory", "ranks"), SMOKES)
def test_smoke(megatron, tmp_path: Path, recipe: str, memory: str, ranks: int) -> None:
    """Seven iterations: five are profiled, and the last two run as planned."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    directory = ("--sparetrain-dir", str(tmp_path))
    run = train(recipe, memory, "--smoke", *directory, MASTER_PORT=port, timeout=500)
    assert run.returncode == 0, run.stdout[-6000:]
    assert "iteration        7/       7" in run.stdout
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (summary["world_size"], summary["iterations"]) == (ranks, 7)
    assert summary["mismatches"] == summary["rollbacks"] == 0
    assert summary["unprotected"] == {}
    plans = [event for event in read_events(tmp_path) if event["kind"] == "plan"]
    assert any("totals" in plan for plan in plans), "no plan was made"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    scripts = [EXAMPLES / "recipe.sh", *EXAMPLES.glob("*/train.sh"), *EXAMPLES.glob("*/*.sbatch")]
    assert len(scripts) == 7
    run = subprocess.run(
        ["shellcheck", "--external-sources", *map(str, scripts)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
