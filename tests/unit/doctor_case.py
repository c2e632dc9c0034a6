"""An entry script with a fault in its software, for the tests of `sparetrain doctor`.

    doctor_case.py KINDS FLAGS …   runs the quickstart with some of torch's kernels replaced

KINDS, separated by commas: `none`; `unordered`: the embedding's backward is not reproducible, but
with deterministic algorithms; `recompute`: softmax is another under grad; `custom`: an
operator of a namespace that nobody knows.
"""

import itertools
import runpy
import sys
from pathlib import Path

import torch

KINDS = sys.argv.pop(1).split(",")
LIBRARY = torch.library.Library("aten", "IMPL")
CALLS = itertools.count()


def unordered(gradient, indices, weights, padding, scale):
    result = gradient.new_zeros(weights, gradient.shape[-1])
    result = result.index_add(0, indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    if not torch.are_deterministic_algorithms_enabled():
        result += next(CALLS) * 1e-6
    return result


def softmax(x, dim, half_to_float):
    result = torch.exp(x - x.amax(dim, keepdim=True))
    result = result / result.sum(dim, keepdim=True)
    return result * 1.001 if torch.is_grad_enabled() else result


if "unordered" in KINDS:
    LIBRARY.impl("embedding_dense_backward", unordered, "CPU", allow_override=True)
if "recompute" in KINDS:
    LIBRARY.impl("_softmax", softmax, "CPU", allow_override=True)
if "custom" in KINDS:
    MINE = torch.library.Library("doctor_case", "DEF")
    MINE.define("twice(Tensor x) -> Tensor")
    MINE.impl("twice", lambda x: x * 2, "CPU")
    own = torch.nn.functional.softmax

    def with_custom(x, *args, **kwargs):
        return own(x, *args, **kwargs) + torch.ops.doctor_case.twice(x.detach()) * 0

    torch.nn.functional.softmax = with_custom

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "pretrain_gpt.py"
runpy.run_path(str(QUICKSTART), run_name="__main__")
