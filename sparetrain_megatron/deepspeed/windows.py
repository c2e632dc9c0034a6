"""Windows in which DeepSpeed waits outside of a blocking collective.

Blocking collectives (gradient reduction, the all-to-all of experts) are windows wherever they come
from, see ``dmr/collectives.py``. Here are the two others: sends and receives between pipeline
stages, which DeepSpeed only knows blocking, and the handles of ZeRO 3's gathers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from ..dmr.engine import Engine
from ..dmr.window import Windows
from ..patching import Patches


class Waits:
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from deepspeed.runtime.pipe import p2p
        from deepspeed.runtime.zero import partition_parameters

        self._engine = engine
        self._windows = Windows(engine)
        for name in ("send", "recv"):
            patches.replace(p2p, name, self._between_stages(getattr(p2p, name), name))
        one = partition_parameters.AllGatherHandle
        several = partition_parameters.AllGatherCoalescedHandle
        for owner, request, complete in (
            (one, "_AllGatherHandle__handle", "_AllGatherHandle__complete"),
            (several, "allgather_handle", "complete"),
        ):
            patches.replace(owner, "wait", self._gather(owner.wait, request, complete))

    def _between_stages(self, original: Any, name: str) -> Any:
        from deepspeed import comm
        from deepspeed.runtime.pipe import p2p

        issue = {"send": comm.isend, "recv": comm.irecv}[name]

        @functools.wraps(original)
        def transfer(tensor: Any, stage: int, async_op: bool = False) -> Any:
            if not self._engine.is_active or async_op or not p2p.can_send_recv():
                return original(tensor, stage, async_op)
            grid = p2p._grid
            p2p._is_valid_send_recv(grid.get_stage_id(), stage)
            request = issue(tensor, grid.stage_to_global(stage_id=stage))
            self._windows.wait([request], grid.get_pipe_parallel_group(), name)
            return None

        return transfer

    def _gather(self, original: Any, request: str, complete: str) -> Any:
        @functools.wraps(original)
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if self._engine.is_active and not getattr(handle, complete):
                self._windows.wait([getattr(handle, request)], dist.group.WORLD, "all_gather")
            return original(handle, *args, **kwargs)

        return wait
