"""Own work in the middle of the framework's: fingerprints at a block's boundary, binding, hooks.

It runs where a function mode may be active (the CPU stand-in's, a user's), which would look at
every method call on a tensor, for microseconds each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def own_work[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Has a function run without function modes and subclasses' functions."""
    without = torch._C.DisableTorchFunction

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with without():
            return function(*args, **kwargs)

    return call
