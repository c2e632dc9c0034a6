"""``tools/setup_env.sh``: what it says when something is missing."""

import os
import subprocess
import sys

from tests.harness import ROOT


def setup_env(**environment):
    command = ["sh", str(ROOT / "tools" / "setup_env.sh")]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_python_that_does_not_run_is_refused(tmp_path):
    shim = program(
        tmp_path / "python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127'
    )
    result = setup_env(PYTHON=shim, VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert f"PYTHON={shim} is not a Python 3.12 that runs" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_failing_shim_on_the_path_is_passed_over(tmp_path):
    # The next candidate is a 3.12 without the venv module, so that nothing is installed here.
    program(tmp_path / "python3.12", "exit 127")
    no_venv = f'case "$2" in *ensurepip*) exit 1 ;; *) exec "{sys.executable}" "$@" ;; esac'
    fake = program(tmp_path / "fake", no_venv)
    program(tmp_path / "python3", f"echo {fake}")
    result = setup_env(
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", PYTHON="", VENV=str(tmp_path / "venv")
    )
    assert result.returncode == 1
    assert f"{fake} has no venv module" in result.stderr


def test_other_environment_is_refused(tmp_path):
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "python", "exit 0")
    result = setup_env(VENV=str(tmp_path))
    assert result.returncode == 1
    assert "is not an environment of Python 3.12" in result.stderr
