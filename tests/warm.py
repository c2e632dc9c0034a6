"""Imported once by the fork server of ``tests.harness``: what every rank needs, and no threads."""

import os
import warnings

import torch

from sparetrain_megatron import hostdevice

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
hostdevice.install()
if "SPARETRAIN_TEST_TE" in os.environ:
    from sparetrain_megatron.hostdevice import te

    te.install()
hostdevice.prepare_megatron()

import megatron.core.datasets.gpt_dataset  # noqa: E402
import megatron.core.dist_checkpointing  # noqa: E402
import megatron.training.training  # noqa: E402, F401

# A fork copies only the thread that forks; what the others hold locked stays locked.
assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
