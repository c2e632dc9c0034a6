"""Gradients and parameters as DeepSpeed's optimizers hold them: to forget and to write."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..dmr.engine import Engine
from ..errors import UsageError
from ..patching import Patches
from . import cpu_adam

_STEP_ALONE = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers of torch that step every parameter by itself, as the check of the step needs."""


def _gradient(parameter: torch.Tensor, *unused: Any) -> list[torch.Tensor]:
    return [] if parameter.grad is None else [parameter.grad]


def _of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


class Gradients:
    """The gradients of one engine without ZeRO; subclasses know a ZeRO stage each.

    Args:
        engine: The DeepSpeed engine.
        protection: This rank's engine of checks.
    """

    def __init__(self, engine: Any, protection: Engine, patches: Patches) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self._checks = protection
        self._patches = patches
        self.label()

    def label(self) -> None:
        """Has the positions of gradient accumulation and communication told."""
        self._accumulates(self.engine, "_backward_epilogue", self._after_backward)

    def _after_backward(self, *unused: Any) -> list[torch.Tensor]:
        self._checks.close_tape()
        return []

    def _accumulates(
        self, owner: Any, name: str, leaving: Callable[..., list[torch.Tensor]] = lambda *_: []
    ) -> None:
        """A method accumulates or reduces gradients: no part of a region that may be deferred.

        Args:
            leaving: What a recorded region gives away by calling it, from its arguments.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            checks = self._checks
            if not checks.is_active:
                return original(*args, **kwargs)
            with checks.at(phase="accumulate"), checks.beside_tape(leaving(*args)):
                return original(*args, **kwargs)

        self._patches.replace(owner, name, wrapper)

    def discard(self) -> None:
        """Forgets the gradients of an attempt."""
        self.engine.zero_grad()

    def constants(self) -> list[torch.Tensor]:
        """Tensors whose memory lives through the step anyway."""
        return list(self.engine.module.parameters())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Parameters that are gathered inside stay gathered until their backward."""
        yield

    def reload(self) -> None:
        """Fetches again, before a repetition, what of the parameters may have arrived wrong."""

    def write_parameters(self) -> None:
        """Writes the parameters from the verified main parameters again, and gathers them."""

    def inner(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose step changes the main parameters.

        Raises:
            UsageError: There is something else.
        """
        optimizer = self.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = getattr(optimizer, "optimizer", None)
            if optimizer is None:
                raise UsageError(
                    f"optimizer {type(self.optimizer).__name__} is not supported with sparetrain: "
                    "it steps no torch optimizer"
                )
        known = type(optimizer).__name__ in _STEP_ALONE and _of_torch(optimizer)
        if not known and not cpu_adam.protect(self._checks, self._patches, optimizer):
            raise UsageError(
                f"optimizer {type(optimizer).__name__} is not supported with sparetrain: only "
                f"{', '.join(sorted(_STEP_ALONE))} of torch.optim and DeepSpeedCPUAdam have been "
                "tested with faults; optimizer.params.torch_adam: true chooses torch's Adam"
            )
        return [optimizer]


class Bf16Gradients(Gradients):
    """``BF16_Optimizer``: 16-bit parameters, 32-bit gradients and main parameters."""

    def label(self) -> None:
        super().label()
        self._accumulates(self.optimizer, "update_hp_grads")

    def discard(self) -> None:
        self.optimizer.clear_lp_grads(set_to_none=True)
        self.optimizer.clear_hp_grads()
        self.optimizer._backward_hook_state.reset_for_new_step()

    def write_parameters(self) -> None:
        self.optimizer.update_lp_params()


class MasterGradients(Gradients):
    """``FP16_UnfusedOptimizer``, which BF16 without ZeRO uses: 32-bit copies of every parameter."""

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def write_parameters(self) -> None:
        groups = zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups)
        for main, model in ((m, p) for mains, models in groups for m, p in zip(mains, models)):
            model.data.copy_(main.data)


class Zero12Gradients(Gradients):
    """ZeRO 1 and 2, with or without offload."""

    def label(self) -> None:
        super().label()
        self._accumulates(self.optimizer, "process_gradients", _gradient)

    def discard(self) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        zero.ready_for_gradients = False
        zero._release_preflattened_grad_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None
        zero.grads_in_partition = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        for reduced in (zero.params_already_reduced,):
            for i in range(len(reduced)):
                reduced[i] = False
        zero._backward_hook_state.reset_for_new_step()

    def write_parameters(self) -> None:
        zero = self.optimizer
        zero.update_lp_params()
        for group in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(group)


class Zero3Gradients(Gradients):
    """ZeRO 3: parameters are gathered when they are needed, and released."""

    _keeping = False

    def constants(self) -> list[torch.Tensor]:
        # What is gathered is released again: a pending check that reads it keeps it, and pays.
        return []

    def label(self) -> None:
        super().label()
        self._accumulates(self.optimizer, "reduce_ready_partitions_and_remove_grads", _gradient)
        offload = self.optimizer.parameter_offload
        for name in (
            "pre_sub_module_forward_function",
            "post_sub_module_forward_function",
            "pre_sub_module_backward_function",
            "post_sub_module_backward_function",
        ):
            self._apart(offload, name)

    def _apart(self, owner: Any, name: str) -> None:
        """What is fetched when differs between forward and recompute: it is no part of a block."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._keeping and name == "post_sub_module_forward_function":
                return None
            with self._checks.beside_tape():
                return original(*args, **kwargs)

        self._patches.replace(owner, name, wrapper)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = before

    def discard(self) -> None:
        zero = self.optimizer
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        zero._offload_boundary_param_ids = set()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        for parameter in zero.params_already_reduced:
            zero.params_already_reduced[parameter] = False
        zero._backward_hook_state.reset_for_new_step()
        zero._get_param_coordinator().hierarchy = 0

    def reload(self) -> None:
        zero = self.optimizer
        zero._partition_all_parameters()
        if len(zero.persistent_parameters) > 0:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def write_parameters(self) -> None:
        zero = self.optimizer
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if len(zero.persistent_parameters) > 0:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradients_of(engine: Any, checks: Engine, patches: Patches) -> Gradients:
    """The right class for an engine's optimizer.

    Raises:
        UsageError: There is none.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    kinds: tuple[tuple[type, type[Gradients]], ...] = (
        (DeepSpeedZeroOptimizer_Stage3, Zero3Gradients),
        (DeepSpeedZeroOptimizer, Zero12Gradients),
        (BF16_Optimizer, Bf16Gradients),
        (FP16_UnfusedOptimizer, MasterGradients),
        (torch.optim.Optimizer, Gradients),
    )
    for kind, found in kinds:
        if isinstance(optimizer, kind):
            return found(engine, checks, patches)
    raise UsageError(
        f"optimizer {type(optimizer).__name__} is not supported with sparetrain: its rollback has "
        "not been tested with faults"
    )
