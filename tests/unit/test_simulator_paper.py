"""The benchmark against the published table."""

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "paper.py"

STAGES = {
    "llama3-70b": {80: 3, 94: 2, 141: 2},
    "mistral-large": {80: 4, 94: 4, 141: 3},
    "llama4-scout": {94: 3, 141: 3},
}


@pytest.fixture(scope="module")
def paper():
    specification = importlib.util.spec_from_file_location("paper", BENCHMARK)
    module = importlib.util.module_from_spec(specification)
    import sys

    sys.modules["paper"] = module  # dataclasses look themselves up there
    specification.loader.exec_module(module)
    yield module
    del sys.modules["paper"]


def test_assumptions_are_of_models_not_of_cells(paper):
    assert paper.TESTBEDS.keys() == paper.PUBLISHED.keys()
    for name, cells in paper.PUBLISHED.items():
        layouts = {}
        for memory in cells:
            _, layout, device, _ = paper.scenario(name, memory, 16, nominal=False)
            layouts[memory] = layout.pipeline
            assert device.memory == memory << 30
        assert layouts == STAGES[name]


def test_a_cell_comes_out_as_published(paper, tmp_path, capsys):
    out = tmp_path / "paper.json"
    command = "--models llama4-scout --memory 94 --no-others --out".split()
    assert paper.main([*command, str(out)]) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["within"] and abs(cell["idle_share"] - 0.77) < 0.05
    assert "llama4-scout" in capsys.readouterr().out


def test_the_stored_table(paper):
    stored = json.loads((BENCHMARK.parent / "results" / "paper.json").read_text())
    cells = {(c["model"], c["memory_gb"]): c for c in stored["cells"]}
    assert len(cells) == sum(map(len, paper.PUBLISHED.values()))
    for cell in cells.values():
        assert cell["within"] and cell["beyond_is_below"]
