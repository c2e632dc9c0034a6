"""An entry script with a fault in its software, for the tests of `sparetrain doctor`.

    doctor_case.py KIND FLAGS …   runs the quickstart's script, with one of torch's kernels replaced

KIND: `none`; `unordered`: the embedding's backward is not reproducible, unless deterministic
algorithms are asked for; `recompute`: silu is another under grad; `custom`: an operator of a
namespace that nobody knows.
"""

import itertools
import runpy
import sys
from pathlib import Path

import torch

KIND = sys.argv.pop(1)
LIBRARY = torch.library.Library("aten", "IMPL")
CALLS = itertools.count()


def unordered(gradient, indices, weights, padding, scale):
    result = gradient.new_zeros(weights, gradient.shape[-1])
    result = result.index_add(0, indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    if not torch.are_deterministic_algorithms_enabled():
        result += next(CALLS) * 1e-6
    return result


def silu(x):
    result = x * torch.sigmoid(x)
    return result * 1.5 if torch.is_grad_enabled() else result


if KIND == "unordered":
    LIBRARY.impl("embedding_dense_backward", unordered, "CPU", allow_override=True)
elif KIND == "recompute":
    LIBRARY.impl("silu", silu, "CPU", allow_override=True)
elif KIND == "custom":
    MINE = torch.library.Library("doctor_case", "DEF")
    MINE.define("twice(Tensor x) -> Tensor")
    MINE.impl("twice", lambda x: x * 2, "CPU")
    own = torch.nn.functional.silu
    torch.nn.functional.silu = lambda x, *rest: (
        torch.ops.doctor_case.twice(x.detach()) * 0 + own(x, *rest)
    )

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "pretrain_gpt.py"
runpy.run_path(str(QUICKSTART), run_name="__main__")
