"""Adam with the interface of Apex's and Transformer Engine's FusedAdam, and torch's arithmetic.

Without these two libraries Megatron falls back to ``torch.optim.AdamW``, which counts its steps
for each parameter. DistributedOptimizer then cannot load a checkpoint: it asks for the one step
count of a state that is still empty (optimizer/distrib_optimizer.py, ``state_dict``). FusedAdam
keeps the count in the parameter group, and Megatron handles that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW whose step count lives in the parameter group.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient with ``adam_w_mode``, else added to it.
        adam_w_mode: AdamW if true, Adam with L2 regularisation otherwise.
        capturable: Accepted for Megatron's sake; True is refused.

    Raises:
        ValueError: ``capturable`` is true; it serves CUDA graphs.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("--optimizer-cuda-graph needs a CUDA device")
        self._update = adamw if adam_w_mode else adam
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: Evaluates the loss again, with gradients.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        params = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        self._update(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            # The update counts one up itself, in a tensor for each parameter.
            [torch.tensor(float(group["step"] - 1)) for _ in params],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
