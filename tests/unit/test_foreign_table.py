"""The table of foreign kernels against the sources of Transformer Engine's Python layer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sparetrain_megatron.dmr.foreign import Write
from sparetrain_megatron.foreign import apex, transformer_engine
from sparetrain_megatron.foreign.table import read
from tests.te import RELEASES, release

CLASSES = {
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "Float8BlockScaleTensorFormat",
}


def extension_names(root: Path) -> dict[str, set[str]]:
    """Names that Python sources take from ``transformer_engine_torch``, and the files that do."""
    names: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        source = path.read_text()
        if "tex" not in source or "jax" in path.parts:
            continue
        tree = ast.parse(source)
        aliases = {"transformer_engine_torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases |= {a.asname for a in node.names if a.name in aliases and a.asname}
            elif isinstance(node, ast.ImportFrom):
                aliases |= {a.name for a in node.names if a.name == "tex"}
                if node.module == "transformer_engine_torch":
                    for alias in node.names:
                        names.setdefault(alias.name, set()).add(path.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in aliases:
                    names.setdefault(node.attr, set()).add(path.name)
    return names


def is_class(name: str) -> bool:
    return name in CLASSES or name.startswith("NVTE")


@pytest.mark.parametrize("version", RELEASES)
def test_every_name_is_known(version):
    numbers = tuple(int(n) for n in version.split(".")[:2])
    library = transformer_engine.library(numbers)
    known = {*library.kernels, *library.harmless, *library.unprotected}
    used = extension_names(release(version) / "transformer_engine" / "pytorch")
    # Two names of torch's own export of ONNX look like ours.
    unknown = {
        name: files
        for name, files in used.items()
        if name not in known and not is_class(name) and not name.startswith(("__", "*"))
        if files != {"onnx_extensions.py"}
    }
    assert not unknown
    assert len(used) > 100


@pytest.mark.parametrize("version", RELEASES)
def test_calls_agree_with_the_parameters(version):
    """No call has more arguments than the table knows, nor a keyword that it does not."""
    numbers = tuple(int(n) for n in version.split(".")[:2])
    kernels = transformer_engine.library(numbers).kernels
    # Only where something is written does the name of a parameter matter.
    checked = 0
    for path in (release(version) / "transformer_engine" / "pytorch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, kernel = node.func.value, kernels.get(node.func.attr)
            if kernel is None or not isinstance(owner, ast.Name) or owner.id != "tex":
                continue
            if not (kernel.writes or kernel.scratch):
                continue
            where = f"{path.name}:{node.lineno} {node.func.attr}"
            if not any(isinstance(a, ast.Starred) for a in node.args):
                assert len(node.args) <= len(kernel.parameters), where
            for keyword in node.keywords:
                assert keyword.arg is None or keyword.arg in kernel.parameters, where
            checked += 1
    assert checked > 15


def test_nothing_is_listed_twice():
    library = transformer_engine.library()
    assert not library.kernels.keys() & library.harmless
    assert not library.kernels.keys() & library.unprotected.keys()
    assert not library.harmless & library.unprotected.keys()


def test_writes_name_parameters():
    for library in (transformer_engine.library(), *apex.libraries()):
        for kernel in library.kernels.values():
            marked = {w.parameter for w in kernel.writes} | kernel.scratch
            assert marked <= set(kernel.parameters), kernel.name
            assert {w.when for w in kernel.writes} <= {None, *kernel.parameters}, kernel.name


def test_a_line_says_it_all():
    text = """
        # a comment
        one two: a b! c!flag d!1 e# flag ; random undefined 2 itemwise d
    """
    kernels = read("lib", text)
    assert set(kernels) == {"one", "two"}
    one = kernels["one"]
    assert one.name == "lib.one"
    assert one.parameters == ("a", "b", "c", "d", "e", "flag")
    assert one.writes == (Write("b"), Write("c", when="flag"), Write("d", start=1))
    assert one.scratch == {"e"} and one.random and one.undefined == {2} and one.itemwise == "d"


@pytest.mark.parametrize(
    ("version", "first"), [((2, 8), "num_tokens"), ((2, 17), "routing_map"), (None, "routing_map")]
)
def test_a_line_may_hold_from_a_release_on(version, first):
    kernels = transformer_engine.library(version).kernels
    assert kernels["fused_topk_with_score_function_bwd"].parameters[0] == first
