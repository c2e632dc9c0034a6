"""The launcher: what the script sees, in which order things happen, and how it ends."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import sparetrain_megatron
from sparetrain_megatron import errors, launcher

ROOT = Path(__file__).parents[2]

SHOW = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0]}))
"""


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in ("RANK", "LOCAL_RANK", "SPARETRAIN_CPU"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text(SHOW)
    return path


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the device and the adapter, noting the order of calls."""
    noted = []
    device = types.ModuleType("sparetrain_megatron.hostdevice")
    device.install = lambda: noted.append("install")
    device.prepare_megatron = lambda: noted.append("prepare")
    adapter = types.ModuleType("sparetrain_megatron.megatron")
    adapter.attach = lambda config: noted.append(config)
    for module in (device, adapter):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(sparetrain_megatron, name, module, raising=False)
    monkeypatch.setattr(launcher, "_require_megatron", lambda: None)
    monkeypatch.setattr(launcher, "_hint_without_gpu", lambda: None)
    return noted


def test_the_script_sees_its_own_command_line(script, calls, capsys):
    command = [str(script), "--lr", "1", "--sparetrain", "-x", "--sparetrain-mode=naive", "a b"]
    assert launcher.main(command) == 0
    assert json.loads(capsys.readouterr().out) == {
        "argv": [str(script), "--lr", "1", "-x", "a b"],
        "name": "__main__",
        "file": str(script),
        "path": str(script.parent),
    }
    assert [config.mode for config in calls] == ["naive"]


def test_the_device_comes_before_the_protection(script, calls):
    assert launcher.main([str(script), "--sparetrain", "--sparetrain-cpu"]) == 0
    assert calls[:2] == ["install", "prepare"]
    assert calls[2].enabled
    assert len(calls) == 3


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_the_device_alone(script, calls, by, monkeypatch):
    if by == "variable":
        monkeypatch.setenv("SPARETRAIN_CPU", "1")
    assert launcher.main([str(script), *(["--sparetrain-cpu"] if by == "flag" else [])]) == 0
    assert calls == ["install", "prepare"]


def test_without_our_flags_nothing_is_touched(script, calls):
    assert launcher.main([str(script), "--lr", "1"]) == 0
    assert calls == []


def test_modules_next_to_the_script_are_found(script, capsys):
    (script.parent / "neighbour_of_script.py").write_text("value = 7")
    script.write_text("import neighbour_of_script as n; print(n.value)")
    assert launcher.main([str(script)]) == 0
    assert capsys.readouterr().out == "7\n"


@pytest.mark.parametrize("code", [0, 3, 76, None, "text"])
def test_the_scripts_exit_code_is_kept(script, code):
    script.write_text(f"import sys; sys.exit({code!r})")
    with pytest.raises(SystemExit) as caught:
        launcher.main([str(script)])
    assert caught.value.code == code


def test_the_scripts_exceptions_are_kept(script):
    script.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        launcher.main([str(script)])


@pytest.mark.parametrize("error", ["UsageError", "RunAborted", "RetriesExhausted"])
def test_our_errors_in_the_script_end_it_with_their_code(script, capsys, monkeypatch, error):
    monkeypatch.setenv("RANK", "3")
    script.write_text(f"from sparetrain_megatron import errors; raise errors.{error}('because')")
    assert launcher.main([str(script)]) == getattr(errors, error).exit_code
    assert capsys.readouterr().err == "sparetrain: error: rank 3: because\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["SCRIPT", "--sparetrain-mode", "naive"], "protection is off"),
        (["SCRIPT", "--sparetrain", "--sparetrain-mode", "x"], "--sparetrain-mode"),
        (["SCRIPT", "--sparetrain-foo"], "no such flag"),
        (["gone.py", "--sparetrain"], "script gone.py doesn't exist"),
        (["--lr", "1", "--sparetrain"], "--lr comes before the script"),
    ],
)
def test_wrong_use(script, capsys, command, expected):
    assert launcher.main([str(script) if part == "SCRIPT" else part for part in command]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparetrain: error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_one_rank_speaks_for_all(script, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launcher.main([str(script), "--sparetrain-foo"]) == 2
    assert launcher.main(["gone.py"]) == 2
    assert launcher.main([]) == 2
    assert capsys.readouterr() == ("", "")
    # A script that is missing on the second machine alone has to be told there.
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launcher.main([str(script), "--sparetrain-foo"]) == 2
    assert capsys.readouterr().err == ""
    assert launcher.main(["gone.py"]) == 2
    assert "gone.py" in capsys.readouterr().err


def test_a_refused_device(script, calls, capsys, monkeypatch):
    def refuse():
        raise RuntimeError("this machine has a CUDA device")

    monkeypatch.setattr(sparetrain_megatron.hostdevice, "install", refuse)
    assert launcher.main([str(script), "--sparetrain-cpu"]) == 2
    assert capsys.readouterr().err == (
        "sparetrain: error: --sparetrain-cpu: this machine has a CUDA device\n"
    )


def test_megatron_missing(script, capsys, monkeypatch):
    def find(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(launcher.importlib.util, "find_spec", find)
    assert launcher.main([str(script), "--sparetrain"]) == 2
    assert "pip install 'sparetrain-megatron[megatron]'" in capsys.readouterr().err


def test_help(capsys):
    assert launcher.main([]) == 2
    text = capsys.readouterr().out
    assert launcher.main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert "SCRIPT" in text
    assert "--sparetrain-on-mismatch" in text
    assert launcher.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparetrain {sparetrain_megatron.__version__}\n"


def test_under_torchrun(script):
    script.write_text(
        "import os, sys; print(f'rank {os.environ[\"RANK\"]} {sys.argv[1:]}\\n', end='')"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "sparetrain_megatron", str(script), "--lr", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ['--lr', '1']", "rank 1 ['--lr', '1']"]
