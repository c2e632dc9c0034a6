"""A training step of a real Megatron GPT that can be repeated from the same start.

The model, its optimizer and everything around them are built by ``megatron.training.pretrain``;
when that calls ``train_step`` for the first time, it has reached a :class:`Bench`, which never
returns to it.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.dmr.mismatch import Mismatch
from sparetrain_megatron.dmr.strategy import Everything, Method, Strategy
from sparetrain_megatron.faults.injector import Injector

WARM_UP = 2
"""Iterations before the one that is repeated: optimizer state exists from the first one on."""

SEQUENCE, VOCABULARY, MICROBATCHES, WIDTH = 32, 64, 2, 64

_COMMON = f"""
    --num-layers 2 --hidden-size {WIDTH} --num-attention-heads 4
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
    --micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters 1000
    --lr 1e-2 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by 8
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion
    --eval-iters 0 --eval-interval 100000 --log-interval 100000 --dataloader-type external
    --no-check-for-nan-in-loss-and-grad --seed 1234
"""
_LLAMA = """
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights
"""
_RECOMPUTE = {
    "none": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective --recompute-modules core_attn layernorm",
}


@dataclass(frozen=True)
class Setup:
    """One configuration of a campaign.

    Attributes:
        mode: ``naive``, ``piggyback``, ``coarse`` or ``full``. The last two defer whatever they
            can, whether a plan would or not; one process has no windows, so that what waits is
            executed at the verdict.
        dtype: ``bf16`` (with FP32 main parameters) or ``fp32``.
        recompute: ``none``, ``full`` or ``selective``.
        on_mismatch: ``report`` shows the harm that a fault does, ``rollback`` what is left of it.
        method: How blocks are deferred: ``segment`` or ``single``.
    """

    mode: str
    dtype: str
    recompute: str
    on_mismatch: str = "report"
    method: Method = "segment"

    @property
    def name(self) -> str:
        method = ", single" if self.method == "single" else ""
        return f"{self.mode}, {self.dtype}, recompute {self.recompute}{method}"

    def flags(self) -> list[str]:
        """Flags of Megatron: BF16 comes with a Llama's layers, FP32 with a GPT's and dropout."""
        if self.dtype == "bf16":
            rest = f"--bf16 {_LLAMA} --attention-dropout 0 --hidden-dropout 0"
            if self.recompute == "selective":
                rest += " --use-distributed-optimizer"
        else:
            rest = "--attention-dropout 0.1 --hidden-dropout 0.1"
        return f"{_COMMON} {rest} {_RECOMPUTE[self.recompute]}".split()


@dataclass(frozen=True)
class Outcome:
    """What came of one run of the step.

    Attributes:
        error: What was raised, or None.
        mismatches: What the engine reported.
        records: The injector's.
        differs: Names of what is not bitwise as in the baseline.
    """

    error: str | None
    mismatches: list[Mismatch]
    records: list[dict[str, Any]]
    differs: list[str]

    @property
    def harmful(self) -> bool:
        return bool(self.differs)


class Bench:
    """The repeatable step.

    Args:
        train_step: Megatron's, protected.
        protection: What protects it.
        arguments: Positional arguments of the call in which training reached it.
        keywords: Its keyword arguments.
        strategy: What is deferred from the warm-up on; None: what the protection itself says.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        protection: Any,
        arguments: tuple,
        keywords: dict,
        strategy: Strategy | None = None,
    ) -> None:
        self._train_step = train_step
        self._arguments = list(arguments)
        self._keywords = keywords
        self._model, self._optimizer, self._scheduler = arguments[2:5]
        self._config = arguments[5]
        self.engine = protection.engine
        self._protection = protection
        self._mismatches: list[Mismatch] = []
        self._batches = [_batch(i) for i in range(MICROBATCHES)]
        self._gradients: list[torch.Tensor] = []
        # A mismatch is counted here instead of being written to files and the terminal.
        self.engine._on_mismatch = self._mismatches.append
        for _ in range(WARM_UP):
            self._step()
        if strategy is not None:
            self.engine.strategy = strategy
        protection.events = None
        self._watch_gradients()
        self._start = _State(self._model, self._optimizer, self._scheduler)
        self.engine.injector = Injector([], 0)
        self.baseline = self._run()[1]

    @property
    def iteration(self) -> int:
        """The iteration that is repeated, as fault specs count."""
        return WARM_UP + 1

    def operators_checked(self) -> int:
        """How many checks there have been since the beginning."""
        self.engine.flush_counts()
        return int(self._protection.statistics.operators_checked)

    def run(self, injector: Any) -> Outcome:
        """Runs the step from its start with an injector in place."""
        self.engine.injector = injector
        error, values = self._run()
        return Outcome(
            error,
            list(self._mismatches),
            list(injector.records),
            _differences(self.baseline, values),
        )

    def _run(self) -> tuple[str | None, dict[str, Any]]:
        self._start.restore()
        self.engine.discard()
        # What a fault taught the engine about the software must not outlive it.
        self.engine._naive_segments.clear()
        self.engine._evidence.clear()
        self._mismatches.clear()
        self._gradients = []
        error, result = None, None
        try:
            result = self._step()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        values = self._start.values()
        for i, gradient in enumerate(self._gradients):
            values[f"gradients {i} when finalized"] = gradient
        for name, number in _numbers(result):
            values[f"result {name}"] = number
        return error, values

    def _step(self) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import get_args

        arguments = list(self._arguments)
        batches = [{name: value.clone() for name, value in b.items()} for b in self._batches]
        arguments[1] = RerunDataIterator(iter(batches))
        # Which iteration it is: an argument, or in 0.17 an attribute of the flags.
        get_args().curr_iteration = WARM_UP
        keywords = {**self._keywords}
        if len(arguments) > 7:
            arguments[7] = WARM_UP
        elif "iteration" in keywords:
            keywords["iteration"] = WARM_UP
        return self._train_step(*arguments, **keywords)

    def _watch_gradients(self) -> None:
        """Keeps the gradients as they are when finalized: clipping changes them in place."""
        finalize = self._config.finalize_model_grads_func

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            result = finalize(*args, **kwargs)
            with self.engine.paused():
                self._gradients = [b.grad_data.clone() for b in _buffers(self._model)]
            return result

        self._config.finalize_model_grads_func = finalize_model_grads


class _State:
    """All that a step changes, as it was at the start."""

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        from sparetrain_megatron.megatron.optimizer import leaves
        from sparetrain_megatron.megatron.state import Snapshot

        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._inner = [leaf.optimizer for leaf in leaves(optimizer)]
        self._snapshot = Snapshot(model, None)
        self._tensors = [(t, t.detach().clone()) for t in self._named().values()]
        self._groups = [
            (group, _settings(group)) for inner in self._inner for group in inner.param_groups
        ]
        self._schedule = copy.deepcopy(vars(scheduler), {id(optimizer): optimizer})

    def _named(self) -> dict[str, torch.Tensor]:
        """Every tensor that outlives the step, gradients apart."""
        named: dict[str, torch.Tensor] = {}
        for chunk in self._model:
            named.update((f"parameter {n}", p.detach()) for n, p in chunk.named_parameters())
            for name, buffer in torch.nn.Module.named_buffers(chunk):
                named[f"buffer {name}"] = buffer.detach()
        for i, inner in enumerate(self._inner):
            for j, parameter in enumerate(p for g in inner.param_groups for p in g["params"]):
                named[f"main parameter {i}.{j}"] = parameter.detach()
                for name, value in inner.state[parameter].items():
                    if isinstance(value, torch.Tensor):
                        named[f"{name} {i}.{j}"] = value
        return named

    def values(self) -> dict[str, Any]:
        """Private copies of all that a fault could have changed for good, by name."""
        values: dict[str, Any] = {k: v.clone() for k, v in self._named().items()}
        for i, buffer in enumerate(_buffers(self._model)):
            values[f"gradients {i} at the end"] = buffer.grad_data.clone()
        for i, (group, _) in enumerate(self._groups):
            values[f"settings {i}"] = repr(_settings(group))
        values["scheduler"] = repr(
            {k: v for k, v in vars(self._scheduler).items() if k != "optimizer"}
        )
        values["generator"] = torch.get_rng_state()
        return values

    def restore(self) -> None:
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for group, settings in self._groups:
            for name in [n for n in group if n != "params" and n not in settings]:
                del group[name]
            group.update(copy.deepcopy(settings))
        vars(self._scheduler).update(
            copy.deepcopy(self._schedule, {id(self._optimizer): self._optimizer})
        )
        self._snapshot.restore(self._optimizer)
        # An error leaves Megatron's machine in the middle of a step.
        get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _buffers(model: list[Any]) -> list[Any]:
    return [b for chunk in model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _numbers(result: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and numbers in what ``train_step`` returns."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield from _numbers(value, f"{name} {key}")
    elif isinstance(result, (list, tuple)):
        for i, value in enumerate(result):
            yield from _numbers(value, f"{name} {i}")
    elif isinstance(result, torch.Tensor):
        yield name, result.detach().clone()
    else:
        yield name, repr(result)


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = [n for n in found if n not in expected]
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            # Of bytes: an oracle that shares nothing with the comparison under test.
            same = value.shape == other.shape and torch.equal(_bytes(value), _bytes(other))
        else:
            same = type(value) is type(other) and value == other
        if not same:
            names.append(name)
    return names


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# --- building the model -----------------------------------------------------------------------


def _batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(VOCABULARY - 1, (1, SEQUENCE + 1), generator=generator)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (torch.rand(1, SEQUENCE, generator=generator) < 0.9).float(),
        "attention_mask": mask.view(1, 1, SEQUENCE, SEQUENCE),
        "position_ids": torch.arange(SEQUENCE).view(1, -1),
    }
    device = "cuda" if torch.version.cuda and torch._C._cuda_getDeviceCount() else "cpu"
    return {name: value.to(device).contiguous() for name, value in batch.items()}


def _model_provider(pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


def _forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    loss = torch.sum(losses.view(-1).float() * mask.view(-1))
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


class _Reached(BaseException):
    """Leaves ``pretrain``; nothing in it may catch this."""


def with_bench(setup: Setup, directory: str, use: Callable[[Bench], None]) -> None:
    """Builds everything for one configuration in this process and hands the bench over.

    Args:
        setup: The configuration.
        directory: For the protection's own files.
        use: Called once; when it returns, so does this.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    # One stream to a device, as Megatron asks for on older GPUs.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    cpu = not torch.cuda.is_available()
    if cpu:
        from sparetrain_megatron import hostdevice

        hostdevice.install()
        hostdevice.prepare_megatron()
    # A store in memory: a campaign needs no port.
    dist.init_process_group("gloo" if cpu else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core.enums import ModelType
    from megatron.training import arguments, pretrain, training

    from sparetrain_megatron import megatron

    defers = setup.mode in ("coarse", "full")
    config = SparetrainConfig(
        enabled=True,
        mode=setup.mode,
        on_mismatch=setup.on_mismatch,
        dir=directory,
        cpu=cpu,
        **({"profile_iters": 1} if defers else {}),
    )
    strategy = Everything(rest=setup.mode == "full", method=setup.method) if defers else None
    protection = megatron.attach(config)
    protected = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        use(Bench(protected, protection, args, kwargs, strategy))
        raise _Reached

    training.train_step = train_step

    def data_provider(*_: Any, **__: Any) -> tuple[Any, None, None]:
        return iter(()), None, None

    data_provider.is_distributed = True  # type: ignore[attr-defined]
    sys.argv = ["campaign", *setup.flags(), "--distributed-backend", "gloo" if cpu else "nccl"]
    first: list[Any] = []
    if hasattr(arguments, "parse_and_validate_args"):  # 0.17 parses in pretrain()
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        first = [pretrain_cfg_container_from_args(arguments.parse_and_validate_args())]
    try:
        pretrain(
            *first,
            train_valid_test_dataset_provider=data_provider,
            model_provider=_model_provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=_forward_step,
        )
    except _Reached:
        return
    raise RuntimeError("Megatron ended without a training step")
