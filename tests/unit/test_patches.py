"""The patches for Megatron-LM: what they add, whether they apply, and what the added lines do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
TAGS = {
    "core_v0.17.0": ("core_v0.17.0", "core_v0.17.1"),
    "core_v0.18.0": ("core_v0.18.0", "core_v0.18.2"),
    "core_v0.19.0": ("core_v0.19.0",),
}


def added(patch: Path) -> list[str]:
    lines = patch.read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]


def test_one_patch_a_release() -> None:
    assert {patch.stem for patch in PATCHES} == TAGS.keys()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_adds_a_few_lines_and_removes_none(patch: Path) -> None:
    text = patch.read_text()
    assert re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE) == ["pretrain_gpt.py"]
    body = text[text.index("@@") :].splitlines()[1:]
    assert not [line for line in body if line.startswith("-")]
    assert len([line for line in body if line.startswith(" ")]) <= 4
    assert len(added(patch)) <= 10
    assert added(patch) == added(PATCHES[0])
    # Before the first import of Megatron, even of the scripts beside this one.
    after = [line for line in body[body.index("+    attach_to_script()") :] if line[0] == " "]
    assert after[0] == " from gpt_builders import gpt_builder"


def run_added(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "pretrain_gpt.py"
    tell = "import json\nprint(json.dumps([sys.argv[1:], 'sparetrain_megatron' in sys.modules]))\n"
    script.write_text("\n".join(added(PATCHES[-1])) + "\n" + tell)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("SPARETRAIN_CPU", None)
    return subprocess.run(
        [sys.executable, str(script), *flags], capture_output=True, text=True, env=environment
    )


def test_the_added_lines_do_nothing_without_our_flags(tmp_path: Path) -> None:
    run = run_added(tmp_path, "--lr", "1")
    assert json.loads(run.stdout) == [["--lr", "1"], False]


def test_the_added_lines_refuse_as_the_launcher_does(tmp_path: Path) -> None:
    run = run_added(tmp_path, "--lr", "1", "--sparetrain-mode", "naive")
    assert run.returncode == 2
    assert run.stderr.startswith("sparetrain: error: --sparetrain-mode given, but protection")


def test_the_added_lines_take_our_flags_away(tmp_path: Path, megatron) -> None:
    run = run_added(tmp_path, "--lr", "1", "--sparetrain-cpu", "--sparetrain")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [["--lr", "1"], True]


def test_errors_later_have_their_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from sparetrain_megatron import errors, launcher\n"
        "launcher.prepare = lambda *args: None\n"
        "launcher.attach_to_script()\n"
        "raise errors.UsageError('because')\n"
    )
    run = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), "--sparetrain"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"},
    )
    assert run.returncode == 2
    assert run.stderr == "sparetrain: error: rank 3: because\n"


@pytest.mark.parametrize(
    ("patch", "tag"), [(patch, tag) for patch in PATCHES for tag in TAGS.get(patch.stem, ())]
)
def test_a_patch_applies(tmp_path: Path, patch: Path, tag: str) -> None:
    if not os.environ.get("MEGATRON_LM_DIR"):
        pytest.skip("MEGATRON_LM_DIR names no checkout of Megatron-LM")
    git = ["git", "-C", os.environ["MEGATRON_LM_DIR"]]
    shown = subprocess.run([*git, "show", f"{tag}:pretrain_gpt.py"], capture_output=True)
    if shown.returncode:
        pytest.skip(f"{os.environ['MEGATRON_LM_DIR']} has no {tag}")
    (tmp_path / "pretrain_gpt.py").write_bytes(shown.stdout)
    for arguments in (["--check"], [], ["--reverse"]):
        run = subprocess.run(
            ["git", "apply", *arguments, str(patch)], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "pretrain_gpt.py").read_bytes() == shown.stdout
