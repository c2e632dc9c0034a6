"""Mixture of experts: what DeepSpeed's gates make at their first use is made before that.

A gate keeps the distributions that it draws from, and makes them in the first forward there is. The
recompute of that forward would not make them again, and so not be the same operators.
"""

from __future__ import annotations

import torch


def prepare(module: torch.nn.Module, device: torch.device) -> None:
    """Makes them for one device, if the model has gates; random generators stay as they are."""
    from deepspeed.moe import sharded_moe

    if not any(isinstance(m, sharded_moe.TopKGate) for m in module.modules()):
        return
    logits = torch.zeros(4, 2, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        sharded_moe.multiplicative_jitter(logits, device)
        sharded_moe.gumbel_rsample(logits.shape, device)
        sharded_moe.top1gating(logits, capacity_factor=1.0, min_capacity=1, use_rts=True)
