"""Each rank's CPU stands in for one CUDA device, so that Megatron trains where there is no GPU.

Megatron-Core and ``megatron.training`` are written for one CUDA device a rank. ``install`` makes
torch answer for such a device and do the work on the CPU, with gloo between the ranks;
``prepare_megatron`` then mends what Megatron itself lacks without a GPU's libraries. Megatron's own
files stay as they are. It serves trials, demonstrations and tests; it is never installed where a
CUDA device is present, and nothing here is imported unless it is asked for.

Two things to know when reading code that runs on it:

* ``tensor.is_cuda`` is true for every tensor, ``tensor.device`` tells the truth (``cpu``).
* One generator plays the CPU's and the device's part: seeding either seeds both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sparetrain_megatron.hostdevice import redirect, surface
from sparetrain_megatron.hostdevice._patches import Patches


@dataclass
class _Installation:
    patches: Patches
    mode: redirect.HostDeviceMode


_installation: _Installation | None = None


def installed() -> bool:
    """Whether the CPU stands in for a CUDA device in this process."""
    return _installation is not None


def install() -> None:
    """Lets the CPU stand in for a CUDA device in this process; does nothing the second time.

    To be called in the thread that trains, before ``megatron`` is imported: several of its modules
    bind functions of ``torch.cuda`` by name.

    Raises:
        RuntimeError: A real CUDA device is present.
    """
    global _installation
    if _installation is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "a CUDA device is present; the CPU stands in for one only where there is none "
            "(hide it with CUDA_VISIBLE_DEVICES= to train on the CPU anyway)"
        )
    # Dynamo asks the CUDA driver for the state of streams when it compiles (core/jit.py).
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Where it may compile all the same, Inductor must not look for the device by itself.
    os.environ.setdefault("TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION", "1")
    patches = Patches()
    surface.replace_device_queries(patches)
    surface.replace_streams(patches)
    surface.replace_random(patches)
    surface.replace_nccl(patches)
    surface.keep_sent_tensors(patches)
    _installation = _Installation(patches, redirect.enter_everywhere(patches))


def uninstall() -> None:
    """Undoes ``install``; for tests.

    To be called in the same thread, when every function mode entered since then has been left.
    What Megatron bound by name at its import stays bound.
    """
    global _installation
    if _installation is None:
        return
    _installation.mode.__exit__(None, None, None)
    _installation.patches.undo()
    _installation = None


def prepare_megatron() -> None:
    """Imports Megatron and mends what it lacks on this device; see ``megatron_mends``.

    To be called after ``install`` and before an entry script uses Megatron.

    Raises:
        RuntimeError: ``install`` has not been called.
        ImportError: megatron-core is not installed, or has no ``megatron.training``.
    """
    if not installed():
        raise RuntimeError("hostdevice.install() has to be called before prepare_megatron()")
    from sparetrain_megatron.hostdevice import megatron_mends

    megatron_mends.mend()
