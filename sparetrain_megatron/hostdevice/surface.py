"""What Megatron calls in ``torch.cuda``, ``torch.accelerator`` and ``torch.distributed``.

Each table below belongs to one kind of question, and names who asks it.
"""

from __future__ import annotations

import collections
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparetrain_megatron.hostdevice import streams
from sparetrain_megatron.hostdevice._patches import Patches

# An A100's: the oldest generation for which Megatron enables BF16.
CAPABILITY = (8, 0)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def replace_device_queries(patches: Patches) -> None:
    """Which devices are there, and which is mine.

    Asked by training/initialize.py (``is_available``, ``device_count``, ``set_device``),
    training/arguments.py (capability), and by ``torch.cuda.current_device()`` throughout.
    """
    current = [0]

    def set_device(device: Any = 0) -> None:
        current[0] = device if isinstance(device, int) else (torch.device(device).index or 0)

    def device_count() -> int:
        # One device for each rank of this host.
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=os.cpu_count(),
        total_memory=memory,
    )
    replacements = {
        "is_available": _answer(True),
        "is_initialized": _answer(True),
        "init": _nothing,
        "_lazy_init": _nothing,
        # tensor_parallel/random.py seeds through it; the callback must run at once.
        "_lazy_call": lambda callback, **_kwargs: callback(),
        "device_count": device_count,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": streams.NoContext,
        "device_of": streams.NoContext,
        "get_device_name": _answer("cpu"),
        "get_device_capability": _answer(CAPABILITY),
        "get_device_properties": _answer(properties),
        "is_bf16_supported": _answer(True),
        # core/utils.py and training.py: memory and load reports. There is nothing to report.
        "memory_stats": lambda *_args, **_kwargs: collections.defaultdict(int),
        "mem_get_info": _answer((memory, memory)),
    }
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "device_memory_used",
        "utilization",
    ):
        replacements[name] = _answer(0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        replacements[name] = _nothing
    for name, replacement in replacements.items():
        patches.set(torch.cuda, name, replacement)

    # DataLoader decides by torch.accelerator, in C++, whether to pin memory.
    for name, replacement in {
        "is_available": _answer(False),
        "current_accelerator": _nothing,
        "device_count": _answer(0),
        "synchronize": _nothing,
        "empty_cache": _nothing,
    }.items():
        patches.set(torch.accelerator, name, replacement)
    for name in ("current_device_index", "current_device_idx"):
        if hasattr(torch.accelerator, name):
            patches.set(torch.accelerator, name, _answer(0))


def replace_streams(patches: Patches) -> None:
    """Streams, events and marks for a profiler.

    Asked by pipeline_parallel/p2p_communication.py (``synchronize`` after each exchange),
    distributed/param_and_grad_buffer.py (communication streams), core/timers.py and
    core/utils.py (events of the straggler detector, NVTX ranges).
    """
    current_stream = _answer(streams.CURRENT_STREAM)
    surface: dict[str, Any] = {
        "Stream": streams.Stream,
        "ExternalStream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.NoContext,
        "StreamContext": streams.NoContext,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "set_stream": _nothing,
        # Not the function that stands in for torch.accelerator's: torch.compile's tracer keeps a
        # table of functions and refuses to enter one twice.
        "synchronize": lambda device=None: None,
        "_sleep": _nothing,
        "is_current_stream_capturing": _answer(False),
    }
    for name, replacement in surface.items():
        patches.set(torch.cuda, name, replacement)
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, _answer(0))
    # torch's own parser of arguments refuses our Stream before any function mode sees the call
    # (transformer/moe/token_dispatcher.py, pipeline_parallel/fine_grained_activation_offload.py).
    patches.set(torch.Tensor, "record_stream", _nothing)


def replace_random(patches: Patches) -> None:
    """The device's generator of random numbers is the CPU's own.

    Operators on CPU tensors draw from that one whatever the caller meant, so the states that
    tensor_parallel/random.py saves, forks and restores have to be its states.
    """
    generator = torch.default_generator
    replacements: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda new_state, device=None: generator.set_state(new_state),
        "set_rng_state_all": lambda new_states: generator.set_state(new_states[0]),
        "initial_seed": lambda: generator.initial_seed(),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
    }
    for name, replacement in replacements.items():
        patches.set(torch.cuda, name, replacement)
        patches.set(torch.cuda.random, name, replacement)
    # Any index that set_device may have been given.
    patches.set(torch.cuda, "default_generators", (generator,) * 1024)


def keep_sent_tensors(patches: Patches) -> None:
    """A tensor that is being sent keeps its memory until it is sent.

    Gloo holds the tensor object, and the pipeline's schedules replace that object's memory by a
    dummy's (pipeline_parallel/schedules.py, ``deallocate_output_tensor``). In the interleaved
    schedule 0.17 does so while the send is under way, which the order of a GPU's streams allows.
    Here gloo gets an alias to hold.
    """
    send = dist.isend

    @functools.wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach(), *args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        patches.set(module, "isend", isend)


def replace_nccl(patches: Patches) -> None:
    """Process groups asked of NCCL are made of gloo.

    ``nccl`` is Megatron's default for ``--distributed-backend``, and parallel_state.py passes NCCL
    options; torch.distributed would also bind the group to the device that it is given.
    """

    def uses_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_gloo(*args: Any, **kwargs: Any) -> Any:
            if "nccl" in str(kwargs.get("backend") or ""):
                kwargs["backend"] = "gloo"
                kwargs["pg_options"] = None
            kwargs.pop("device_id", None)
            return function(*args, **kwargs)

        return with_gloo

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # Without a name torch would choose gloo for the CPU and NCCL for the device.
        gloo_init(*args, backend=backend or "gloo", **kwargs)

    gloo_init = uses_gloo(dist.init_process_group)
    new_group = uses_gloo(dist.new_group)
    for module in (dist, dist.distributed_c10d):
        patches.set(module, "init_process_group", init_process_group)
        patches.set(module, "new_group", new_group)
