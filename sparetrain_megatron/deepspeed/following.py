"""What a loop makes of losses before they have been verified, and how it is set right.

A loop adds the losses of its microbatches up as they come, for its log, long before the verdict at
the accumulation boundary. When the iteration is repeated, the losses themselves are set right in
place; here is what follows from them: the torch functions that used a loss between its backward and
the boundary are noted, and done again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .recording import tensors_of, writes


@dataclasses.dataclass(slots=True)
class _Use:
    function: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any


class Follower(TorchFunctionMode):
    """Notes what is done with the losses of one iteration; entered while the loop's own code runs.

    Attributes:
        lost: Something was written that can't be set right.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self._known: dict[int, torch.Tensor] = {}  # held, or its id would be another's
        self._uses: list[_Use] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def follow(self, losses: Sequence[torch.Tensor]) -> None:
        """From now on the use of these is noted."""
        self._known.update((id(t), t) for t in losses)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = tensors_of((args, kwargs))
        if not any(id(t) in self._known for t in used):
            return func(*args, **kwargs)
        if writes(func) and isinstance(args[0], torch.Tensor) and id(args[0]) not in self._known:
            self._before.append((args[0], args[0].detach().clone()))
            self._known[id(args[0])] = args[0]
        versions = [(t, t._version) for t in used if id(t) not in self._known]
        result = func(*args, **kwargs)
        self.lost |= any(t._version != version for t, version in versions)
        made = tensors_of(result)
        if made or isinstance(result, (bool, int, float)):
            self._uses.append(_Use(func, args, kwargs, result))
            self.follow(made)
        return result

    def set_right(self) -> bool:
        """Does everything again; the losses are right by now.

        Returns:
            Whether nothing is left of the discarded losses, as far as can be told: a number that
            the loop has read, or a decision that it has taken, can't be put right.
        """
        right = not self.lost
        with torch.no_grad():
            for target, value in self._before:
                target.data.copy_(value)
            for use in self._uses:
                again = use.function(*use.args, **use.kwargs)
                if isinstance(use.result, (bool, int, float)):
                    right &= again == use.result or (again != again and use.result != use.result)
                for old, new in zip(tensors_of(use.result), tensors_of(again)):
                    if old is not new and old.shape == new.shape:
                        old.data.copy_(new.data)
        return bool(right)
