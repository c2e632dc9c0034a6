"""A second device decides: a peer repeats an operator from the same inputs.

Two executions on one device can't see a device that repeats its error. After a mismatch, and for a
sampled share of the clean checks, the next rank of a group executes the operator as well. All of it
happens at a verdict, in a ring, so it can't deadlock.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .fingerprint import Fingerprint, fingerprint
from .mismatch import Mismatch
from .operators import Operator, describe, tensors_of

if TYPE_CHECKING:
    from .engine import Engine


@dataclasses.dataclass(slots=True, frozen=True)
class Call:
    """An operator with the arguments it was called with; calling it executes it again."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def size(self) -> int:
        """Bytes of the tensor arguments."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self.args, self.kwargs))

    def held(self) -> Call:
        """The same with private copies of the tensors."""
        return Call(self.func, _copied(self.args), _copied(self.kwargs))

    @property
    def travels(self) -> bool:
        """Whether a peer can execute it: a library operator, no generator among arguments."""
        if not isinstance(self.func, torch._ops.OpOverload):
            return False  # a kernel that the dispatcher doesn't see
        values = [*self.args, *self.kwargs.values()]
        return not any(isinstance(v, (torch.Generator, torch.ScriptObject)) for v in values)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return value


@dataclasses.dataclass(slots=True)
class _Question:
    call: Call
    mismatch: Mismatch
    primary: int
    checker: int


class SecondDevice:
    """Keeps calls for a peer to repeat.

    Args:
        rate: Share of clean checks that a peer repeats, 0 to 1.
        after_mismatch: Whether a peer decides after a mismatch.
        memory: Bytes of arguments that may be kept in one iteration; what does not fit is not
            sampled.
    """

    def __init__(
        self, rate: float = 0.0, after_mismatch: bool = False, memory: int = 64 << 20
    ) -> None:
        self.rate = rate
        self.after_mismatch = after_mismatch
        self.memory = memory
        self.group: Any = None
        self.sampling = False
        self._random = random.Random()
        self._left = memory
        self._samples: list[_Question] = []
        self._suspects: list[_Question] = []

    @property
    def has_peer(self) -> bool:
        return self.group is not None and self.group.size() > 1

    def begin(self, iteration: int, attempt: int) -> None:
        self.sampling = self.rate > 0 and self.has_peer
        if self.sampling:
            self._random.seed(f"{self.group.rank()}/{iteration}/{attempt}")
        self._left = self.memory

    def sample(
        self,
        engine: Engine,
        operator: Operator,
        call: Call,
        results: Sequence[torch.Tensor],
    ) -> None:
        """A clean check of an operator that reads only; keeps it with the sampling rate."""
        if operator.random or self._random.random() >= self.rate or not call.travels:
            return
        if call.size > self._left:
            return
        self._left -= call.size
        engine.held(self.memory - self._left)
        mismatch = engine.reporter(operator.name, "second_device")()
        digest = digest_of(results)
        self._samples.append(_Question(call.held(), mismatch, digest, digest))

    def suspect(self, mismatch: Mismatch, call: Call, primary: int, checker: int) -> None:
        """A mismatch whose operator a peer can repeat."""
        if not (self.after_mismatch and self.has_peer and call.travels):
            return
        if describe(call.func).random or len(self._suspects) >= 4:
            return
        self._suspects.append(_Question(call.held(), mismatch, primary, checker))

    def exchange(self, engine: Engine) -> None:
        """Has the samples repeated; collective over the group whenever sampling is on."""
        if not self.sampling:
            return
        samples, self._samples = self._samples, []
        for question, answer in zip(samples, self._ask(samples, engine.device)):
            engine.statistics.second_device_checks += 1
            if answer != question.primary:
                question.mismatch.note = (
                    f"rank {self._peer()} computed something else from the same inputs; this "
                    "device agrees with itself, so one of the two repeats an error"
                )
                engine.ledger.record(question.mismatch)

    def decide(self, engine: Engine, found: Sequence[Mismatch]) -> None:
        """After a dirty verdict a peer says which execution was wrong; collective."""
        if not (self.after_mismatch and self.has_peer):
            return
        suspects, self._suspects = self._suspects, []
        for question, answer in zip(suspects, self._ask(suspects, engine.device)):
            engine.statistics.second_device_checks += 1
            mismatch = question.mismatch
            if answer == question.primary:
                verdict = "checker"
            elif answer == question.checker:
                verdict = "primary"
            else:
                mismatch.note = f"rank {self._peer()} agrees with neither execution"
                continue
            if mismatch.wrong != "software":
                mismatch.wrong = verdict
            mismatch.note = f"decided by rank {self._peer()}" + (
                f"; {mismatch.note}" if mismatch.note else ""
            )

    def abandon(self) -> None:
        self._samples.clear()
        self._suspects.clear()

    def _peer(self) -> int:
        size = self.group.size()
        return dist.get_global_rank(self.group, (self.group.rank() + 1) % size)

    def _ask(self, questions: Sequence[_Question], device: torch.device) -> list[int]:
        """Sends calls to the next rank of the ring, repeats those of the one before, returns
        digests.
        """
        group = self.group
        size, rank = group.size(), group.rank()
        ahead = dist.get_global_rank(group, (rank + 1) % size)
        behind = dist.get_global_rank(group, (rank - 1) % size)
        calls = [(q.call.func.name(), q.call.args, q.call.kwargs) for q in questions]
        theirs = _ring(_packed(calls, device), ahead, behind, group, device)
        answers = []
        for name, args, kwargs in _unpacked(theirs, device):
            namespace, operator = name.split("::")
            operator, _, overload = operator.partition(".")
            func = getattr(getattr(torch.ops, namespace), operator)
            answers.append(
                digest_of(tensors_of([getattr(func, overload or "default")(*args, **kwargs)]))
            )
        mine = _ring(_packed(answers, device), behind, ahead, group, device)
        return _unpacked(mine, device)


def combine(digests: Sequence[Fingerprint]) -> int:
    """One number for the fingerprints of several results."""
    combined = 0
    for digest in digests:
        combined = (combined * 1099511628211 + int(digest)) & ((1 << 64) - 1)
    return combined


def digest_of(results: Sequence[torch.Tensor]) -> int:
    """One number for several results; makes the host wait on a CUDA device."""
    return combine([fingerprint(t) for t in results])


def _packed(value: Any, device: torch.device) -> torch.Tensor:
    buffer = io.BytesIO()
    # torch.save's own default protocol can't write a memory format, which many calls have.
    torch.save(value, buffer, pickle_protocol=pickle.DEFAULT_PROTOCOL)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)


def _unpacked(data: torch.Tensor, device: torch.device) -> Any:
    # Written by a rank of the same job a moment ago.
    buffer = io.BytesIO(data.cpu().numpy().tobytes())
    return torch.load(buffer, map_location=device, weights_only=False)


def _ring(
    data: torch.Tensor, to: int, source: int, group: Any, device: torch.device
) -> torch.Tensor:
    """Sends to one neighbour while receiving from the other."""

    def swap(out: torch.Tensor, into: torch.Tensor) -> None:
        requests: list[Any] = [
            dist.irecv(into, src=source, group=group),
            dist.isend(out, dst=to, group=group),
        ]
        for request in requests:
            request.wait()

    length = torch.zeros(1, dtype=torch.int64, device=device)
    swap(torch.tensor([data.numel()], dtype=torch.int64, device=device), length)
    received = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    swap(data, received)
    return received
