"""Transformer Engine's modules, trained for a few steps where it is installed; see ``test_te``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

RECIPES = ("bf16", "current", "delayed")
_ROWS, _WIDTH, _WIDE = 32, 64, 96
_SPLITS = [16, 0, 16]


def _context(recipe: str) -> Any:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    if recipe == "bf16":
        return contextlib.nullcontext()
    kind = DelayedScaling if recipe == "delayed" else Float8CurrentScaling
    return te.fp8_autocast(enabled=True, fp8_recipe=kind())


def _modules() -> dict[str, tuple[Any, Callable[[Any, torch.Tensor], torch.Tensor]]]:
    """Each module and how it is called; all weights from the present seed."""
    import transformer_engine.pytorch as te

    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    return {
        "Linear": (te.Linear(_WIDTH, _WIDE, **options), lambda m, x: m(x)),
        "LayerNormLinear": (
            te.LayerNormLinear(_WIDTH, _WIDE, normalization="RMSNorm", bias=False, **options),
            lambda m, x: m(x),
        ),
        "LayerNormMLP": (
            te.LayerNormMLP(
                _WIDTH,
                2 * _WIDTH,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                **options,
            ),
            lambda m, x: m(x),
        ),
        "GroupedLinear": (
            te.GroupedLinear(len(_SPLITS), _WIDTH, _WIDE, bias=False, **options),
            lambda m, x: m(x, _SPLITS),
        ),
    }


def _reference(name: str, module: Any, x: torch.Tensor) -> torch.Tensor:
    """The same in FP32."""
    weights = {n: p.detach().float() for n, p in module.named_parameters()}

    def normed(x: torch.Tensor) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights["layer_norm_weight"]
        )

    if name == "Linear":
        return x @ weights["weight"].t() + weights["bias"]
    if name == "LayerNormLinear":
        return normed(x) @ weights["weight"].t()
    if name == "LayerNormMLP":
        gate, up = (normed(x) @ weights["fc1_weight"].t()).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ weights["fc2_weight"].t()
    parts = x.split(_SPLITS)
    return torch.cat([part @ weights[f"weight{i}"].t() for i, part in enumerate(parts)])


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b).norm() / b.norm()).item()


def errors(rank: int) -> dict[tuple[str, str], tuple[float, float]]:
    """An ``after`` hook: relative errors of outputs and input gradients, by recipe and module."""
    found = {}
    for recipe in RECIPES:
        torch.manual_seed(1)
        for name, (module, call) in _modules().items():
            x = torch.randn(_ROWS, _WIDTH, device="cuda").bfloat16().requires_grad_()
            exact = x.detach().float().requires_grad_()
            for _ in range(3):  # delayed scaling needs a history
                x.grad = None
                with _context(recipe):
                    y = call(module, x)
                gradient = torch.randn_like(y)
                y.backward(gradient)
            right = _reference(name, module, exact)
            right.backward(gradient.float())
            found[recipe, name] = (_error(y, right.detach()), _error(x.grad, exact.grad))
    found["bf16", "DotProductAttention"] = _attention()
    return found


def _attention() -> tuple[float, float]:
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(4, 16, attn_mask_type="causal")
    q, k, v = (torch.randn(16, 2, 4, 16, device="cuda").bfloat16() for _ in range(3))
    q.requires_grad_()
    exact = q.detach().float().requires_grad_()
    y = attention(q, k, v)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    heads = [t.float().permute(1, 2, 0, 3) for t in (exact, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    right = right.permute(2, 0, 1, 3).reshape(y.shape)
    right.backward(gradient.float())
    assert exact.grad is not None and q.grad is not None
    return _error(y, right.detach()), _error(q.grad, exact.grad)


def _train(recipe: str) -> list[torch.Tensor]:
    """Three steps with every module; everything that they leave behind."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(2)
    left: list[torch.Tensor] = []
    modules = _modules()
    for _ in range(3):
        for module, call in modules.values():
            x = torch.randn(_ROWS, _WIDTH, device="cuda").bfloat16().requires_grad_()
            with _context(recipe):
                y = call(module, x)
            y.backward(torch.ones_like(y))
            left += [y.detach(), x.grad]  # type: ignore[list-item]
            for parameter in module.parameters():
                left.append(parameter.grad.clone())
                parameter.data -= 0.01 * parameter.grad
                parameter.grad = None
    for module, _ in modules.values():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = (getattr(module, "fp8_meta", None) or {}).get(key)
            if hasattr(state, "amax_history"):
                left += [state.scale, state.amax_history]
    return left


def doubled(rank: int) -> dict[str, Any]:
    """An ``after`` hook: what a protected training does otherwise than an unprotected one."""
    import transformer_engine_torch as extension

    from sparetrain_megatron.foreign import seam, transformer_engine
    from sparetrain_megatron.patching import Patches
    from tests.unit.protected import Watched

    counts: Counter[str] = Counter()

    def counting(name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kernel(*args, **kwargs)

        return call

    patches = Patches()
    kernels = transformer_engine.library(seam.installed_version()).kernels
    counters = {
        id(kernel): counting(name, kernel)
        for name, kernel in vars(extension).items()
        if name in kernels
    }
    seam.replace_everywhere(counters, patches, extension.__name__)
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        counts.clear()
        expected = _train(recipe)
        once = dict(counts)
        engine = Watched()
        ours = Patches()
        seam.protect(engine, ours)
        counts.clear()
        results = engine.protect(lambda recipe=recipe: _train(recipe))
        ours.undo()
        found[recipe] = {
            "alarms": [m.operator for m in engine.found],
            "same": all(map(torch.equal, results, expected)),
            "once": once,
            "twice": dict(counts),
            "unprotected": dict(engine.counters.unprotected),
        }
    patches.undo()
    return found
