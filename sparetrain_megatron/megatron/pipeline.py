"""Windows in the pipeline's sends and receives (D-DMR_inter).

Every tensor between stages goes through ``P2PCommunicator._communicate``, which issues and waits.
Here it issues without waiting, the window is served until all requests have completed, and only
then it returns. Where the schedule itself waits later (interleaved stages, whose transfers overlap
with computing), that wait is the window. Waiting for a late peer is a window like waiting for the
wire, so bubbles count too.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch.distributed as dist

from ..dmr.engine import Engine
from ..dmr.window import Windows
from ..patching import Patches


class Pipeline:
    """Installs the wrappers for one engine."""

    def __init__(self, engine: Engine, patches: Patches) -> None:
        from megatron.core.pipeline_parallel import p2p_communication

        self._engine = engine
        self._windows = Windows(engine)
        self._configs: dict[int, Any] = {}
        owner = p2p_communication.P2PCommunicator
        original = owner._communicate
        patches.replace(owner, "_communicate", functools.wraps(original)(self._wrap(original)))
        issue = p2p_communication._p2p_ops
        patches.replace(p2p_communication, "_p2p_ops", receives_first(issue))

    def _wrap(self, original: Any) -> Any:
        engine = self._engine

        def communicate(communicator: Any, *, wait_on_reqs: bool = True, **what: Any) -> Any:
            if not engine.is_active:
                return original(communicator, wait_on_reqs=wait_on_reqs, **what)
            config = communicator.config
            communicator.config = self._unbatched(config)
            try:
                previous, following, requests = original(communicator, wait_on_reqs=False, **what)
            finally:
                communicator.config = config
            if not wait_on_reqs:
                return previous, following, self._begun(communicator.pp_group, requests)
            values = requests.values() if isinstance(requests, dict) else requests
            name = "+".join(requests) if isinstance(requests, dict) else "p2p"
            self._wait(communicator.pp_group, name, [r for r in values or () if r is not None])
            return previous, following, None

        return communicate

    def _unbatched(self, config: Any) -> Any:
        """The same configuration with separate requests, which can be waited for one by one."""
        found = self._configs.get(id(config))
        if found is None:
            found = self._configs[id(config)] = copy.copy(config)
            found.batch_p2p_comm = False
        return found

    def _wait(self, group: Any, name: str, requests: list[Any]) -> None:
        self._windows.wait(requests, group, name)

    def _begun(self, group: Any, requests: Any) -> Any:
        if not isinstance(requests, dict):
            return requests
        return {
            name: request if request is None else Begun(self, group, name, request)
            for name, request in requests.items()
        }


class Begun:
    """A transfer that the schedule waits for later."""

    def __init__(self, pipeline: Pipeline, group: Any, name: str, request: Any) -> None:
        self._pipeline = pipeline
        self._group = group
        self._name = name
        self._request = request
        self._waited = False

    def wait(self) -> bool:
        """Waits, in a window, until it has completed."""
        if not self._waited:
            self._waited = True
            if self._pipeline._engine.is_active:
                self._pipeline._wait(self._group, self._name, [self._request])
            else:
                self._request.wait()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def receives_first(issue: Any) -> Any:
    """Posts receives before sends on gloo, which else serialises transfers of both directions."""

    @functools.wraps(issue)
    def p2p_ops(*, group: Any, **what: Any) -> Any:
        if dist.get_backend(group) != "gloo":
            return issue(group=group, **what)
        nothing = {k: None for k in what if k.startswith(("tensor_send", "tensor_recv"))}
        receives = {k: v for k, v in what.items() if k.startswith("tensor_recv")}
        sends = {k: v for k, v in what.items() if k.startswith("tensor_send")}
        requests = dict(issue(group=group, **{**what, **nothing, **receives}))
        requests.update(issue(group=group, **{**what, **nothing, **sends}))
        return requests

    return p2p_ops
