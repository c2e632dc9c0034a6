"""Transformer Engine's real Python layer over CPU kernels: exact as it should be, and doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import te_modules
from tests.harness import run_case, succeeded
from tests.te import NEWEST, RELEASES

pytestmark = pytest.mark.usefixtures("megatron")

# Largest relative error of the output and of the input's gradient.
_FP8 = {"Linear": (4.5e-2, 7e-2), "LayerNormMLP": (8e-2, 11e-2)}
_BF16 = {"LayerNormMLP": (6e-3, 8e-3), "DotProductAttention": (4e-3, 8e-3)}


def in_a_process(after, te):
    (rank,) = succeeded(run_case([], 1, script=Path(__file__), after=after, te=te))
    return rank.value


def test_errors():
    found = in_a_process(te_modules.errors, NEWEST)
    assert len(found) == 13
    for (recipe, name), (output, gradient) in found.items():
        if recipe == "bf16":
            bounds = _BF16.get(name, (3e-3, 4e-3))
        else:
            bounds = _FP8.get(name, _FP8["Linear"])
        assert output < bounds[0] and gradient < bounds[1], (recipe, name, output, gradient)


@pytest.mark.parametrize("version", RELEASES)
def test_every_kernel_runs_twice(version):
    for recipe, found in in_a_process(te_modules.doubled, version).items():
        assert found["alarms"] == [] and found["same"] and not found["unprotected"], recipe
        assert found["twice"] == {name: 2 * n for name, n in found["once"].items()}, recipe
        assert sum(found["once"].values()) > 60, recipe
