"""A small GPT trained with DeepSpeed in one rank: what the tests of the DeepSpeed adapters run.

Told what to do by a dictionary, and leaves one: losses, digests, what the injector did.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.deepspeed_watch import Watch, account

VOCAB, WIDTH, LENGTH, HEADS = 64, 32, 16, 4


class Block(nn.Module):
    """A transformer layer; with ``moe`` its MLP is a mixture of experts on ``ep_size`` ranks."""

    def __init__(self, dropout: float = 0.0, moe: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        if moe:
            from deepspeed.moe.layer import MoE

            mlp = MoE(WIDTH, mlp, **moe)
        self.mlp, self.dropout = mlp, dropout
        self.last = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, WIDTH)), self.dropout)
        y = self.mlp(self.norm2(x))
        return x + self.last(y[0] if isinstance(y, tuple) else y)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Gpt(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(), Head()
        moe = case.get("moe")
        self.layers = nn.ModuleList(Block(case.get("dropout", 0.0), moe) for _ in range(2))
        self.checkpoint = case.get("checkpoint")
        self.keeps, self.scale = case.get("keeps"), None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        if self.keeps:
            if self.scale is None:  # neither parameter nor buffer
                self.scale = torch.exp(torch.linspace(0, 1, WIDTH, dtype=x.dtype))
            x = x * self.scale
        for layer in self.layers:
            x = self._checkpointed(layer, x)
        logits = self.head(x)
        return logits if labels is None else cross_entropy(logits, labels)

    def _checkpointed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        import deepspeed
        from torch.utils.checkpoint import checkpoint

        if self.checkpoint == "deepspeed":
            return deepspeed.checkpointing.checkpoint(layer, x)
        if self.checkpoint == "deepspeed_non_reentrant":
            return deepspeed.checkpointing.non_reentrant_checkpoint(layer, x)
        if self.checkpoint in ("torch", "torch_reentrant"):
            return checkpoint(layer, x, use_reentrant=self.checkpoint != "torch")
        return layer(x)


def ds_config(case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration for a case."""
    stage = case.get("stage", 0)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": 5000,
        "stage3_param_persistence_threshold": case.get("persistence", 100),
    }
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 3e-3,
                "weight_decay": 0.1,
                "torch_adam": not case.get("cpu_adam"),
            },
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bool(case.get("bf16"))},
    }
    if case.get("pipeline"):
        config["pipeline"] = {
            "activation_checkpoint_interval": case.get("interval", 0),
            "use_reentrant": case.get("use_reentrant", False),
        }
    if case.get("block") is not None:
        config["sparetrain"] = case["block"]
    config.update(case.get("config", {}))
    return config


class Hidden(torch.autograd.Function):
    """A loss that can't be followed from the outputs, as functions of the user's own can't."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            detached = logits.detach().requires_grad_()
            loss = cross_entropy(detached, labels)
            (ctx.gradient,) = torch.autograd.grad(loss, detached)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore
        return ctx.gradient * gradient, None


def hidden_loss(outputs: torch.Tensor, ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
    """The same loss from what the engine's forward was given: the next tokens are its labels."""
    return Hidden.apply(outputs, ids.roll(-1, 1))


def initialized(case: dict[str, Any], **what: Any) -> Any:
    """The engine, protected in one of the ways there are."""
    import deepspeed

    how = case.get("how", "import")
    if how == "import" or (case.get("block") is None and not case.get("demands")):
        return deepspeed.initialize(**what)[0]
    from sparetrain_megatron import deepspeed as protected
    from sparetrain_megatron.config import SparetrainConfig

    loss = hidden_loss if case.get("closure") else None
    if how == "initialize":
        return protected.initialize(**what, loss=loss)[0]
    block = what["config"].pop("sparetrain")
    engine = deepspeed.initialize(**what)[0]
    assert protected.attached() == []
    protected.attach(engine, SparetrainConfig(**block), loss=loss)
    return engine


def batches(rank: int, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    ids = [torch.randint(VOCAB, (2, LENGTH + 1), generator=generator) for _ in range(number)]
    return [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]


def train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Trains ``case["iterations"]`` iterations.

    Returns:
        losses, weights and optimizer (digests), faults, and problems found in DeepSpeed's state.
    """
    import deepspeed

    if case.get("block") is not None:
        import sparetrain_megatron.deepspeed  # noqa: F401
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    iterations, accumulation = case.get("iterations", 3), case.get("accumulation", 1)
    config = ds_config(case)
    if case.get("pipeline"):
        from deepspeed.pipe import LayerSpec, PipelineModule

        layers = [LayerSpec(Embedding), *[LayerSpec(Block)] * 2, LayerSpec(Head)]
        model: nn.Module = PipelineModule(
            layers,
            num_stages=2,
            loss_fn=cross_entropy,
            partition_method="uniform",
            # Reentrant checkpointing needs an input that requires gradients: no tokens.
            checkpointable_layers=["Block"] if case.get("use_reentrant") else None,
        )
    else:
        model = Gpt(case)
    parameters: Any = model.parameters()
    if case.get("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(parameters), "name": "parameters"}
        )
    engine = initialized(case, model=model, model_parameters=parameters, config=config)
    torch.manual_seed(5 + rank)
    protection = getattr(engine, "sparetrain", None)
    if protection is not None and case.get("force"):
        from sparetrain_megatron.dmr.strategy import Everything

        # Everything is deferred, whether a plan would or not.
        protection.planning.follow(Everything(**case["force"]))
    watch = Watch(engine) if case.get("watch") else None
    most_held = [0] if protection is None else account(protection.engine.deferred)
    seen = None if case.get("pipeline") else rank
    data = batches(0 if seen is None else seen, iterations * accumulation)
    losses, problems = [], []
    total = torch.zeros(())
    buffers = [torch.empty_like(t) for t in data[0]]
    unread: list[torch.Tensor] = []
    if case.get("pipeline"):
        iterator = iter(data)
        for _ in range(iterations):
            losses.append(engine.train_batch(iterator).item())
    else:
        for i, (ids, labels) in enumerate(data):
            if case.get("closed_after") == i:
                from sparetrain_megatron.deepspeed import close

                close()
            if case.get("static"):
                # A loader that uses its memory again, by means that no operator is seen of.
                for buffer, value in zip(buffers, (ids, labels)):
                    buffer.numpy()[...] = value.numpy()
                ids, labels = buffers
            if case.get("hidden"):
                loss = Hidden.apply(engine(ids), ids.roll(-1, 1))
            elif case.get("outside"):
                logits = engine(ids)
                mask = (labels >= 0).float()
                loss = (cross_entropy(logits, labels) * mask.sum()) / mask.numel()
                loss = loss * 0.5 + logits.float().square().mean() * 1e-3
            else:
                loss = engine(ids, labels)
            if case.get("told"):
                engine.set_gradient_accumulation_boundary((i + 1) % accumulation == 0)
            if case.get("direct"):
                loss.backward()
            else:
                engine.backward(loss)
            if not case.get("told") or (i + 1) % accumulation == 0:
                engine.step()
            # Read when they have been verified; added up before.
            unread.append(loss)
            total += loss.detach() / accumulation
            if (i + 1) % accumulation == 0:
                losses += [value.item() for value in unread]
                unread.clear()
                problems += _left_over(engine)
    result = {
        "losses": [*losses, total.item()],
        "weights": _digest(_weights(engine)),
        "optimizer": _digest(_states(engine)),
        "problems": problems,
        "faults": [] if protection is None else protection.injector.records,
        "most_held": most_held[0],
        "replayed": {} if protection is None else dict(protection.engine.deferred.operators),
    }
    if watch is not None:
        result["watched"] = watch.counts
        problems += watch.problems
    if protection is not None:
        from sparetrain_megatron.deepspeed import close

        close()
    return result


def _left_over(engine: Any) -> list[str]:
    """What of an iteration's gradients is still there after its step."""
    buckets = getattr(engine.optimizer, "ipg_buckets", {})
    found = [f"bucket {key} holds {len(b.params)}" for key, b in buckets.items() if b.params]
    return found + [f"{n} has a gradient" for n, p in engine.module.named_parameters() if _grad(p)]


def _grad(parameter: torch.Tensor) -> bool:
    # Zeroes are as good as none: the 16-bit optimizer keeps them.
    return parameter.grad is not None and bool(parameter.grad.any())


def _weights(engine: Any) -> Any:
    from deepspeed.runtime.zero import GatheredParameters

    if engine.zero_optimization_stage() < 3:
        yield from engine.module.named_parameters()
        return
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            yield name, parameter.detach().clone()


def _states(engine: Any) -> Any:
    optimizer = engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    for i, (parameter, state) in enumerate(optimizer.state.items()):
        yield f"{i}", parameter
        yield from sorted(state.items())


def _digest(values: Any) -> str:
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(raw.numpy())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def environment(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
