"""How fast candidates for comparing and fingerprinting read a tensor.

    python benchmarks/fingerprint.py [--mib 1 16 256] [--device cpu|cuda] [--json FILE]

The measure is a plain read (an int64 sum): nothing that looks at every byte is faster. Each figure
is the median of several runs, in GB (1e9 bytes) of tensor a second; a comparison reads twice that.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

MIB = 1 << 20


def raw(tensor: torch.Tensor) -> ctypes.Array:
    """The tensor's own memory as a buffer, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr())


def cpu_candidates(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    from sparetrain_megatron.dmr import bits
    from sparetrain_megatron.dmr.fingerprint import fingerprint

    other, words = tensor.clone(), tensor.view(torch.int64)
    other_words = other.view(torch.int64)
    weights = torch.arange(1, 2 * words.numel(), 2)
    return {
        "plain read (int64 sum)": words.sum,
        "product: fingerprint": lambda: fingerprint(tensor),
        "product: bitwise equal": lambda: bits.equal(tensor, other),
        "XXH3-128": lambda: xxhash.xxh3_128_intdigest(raw(tensor)),
        "XXH3-64": lambda: xxhash.xxh3_64_intdigest(raw(tensor)),
        "CRC-32 (zlib)": lambda: zlib.crc32(raw(tensor)),
        "int64 dot product": lambda: torch.dot(words, weights),
        "XOR (torch.hash_tensor)": lambda: torch.hash_tensor(words),
        "torch.equal, int64 view": lambda: torch.equal(words, other_words),
        "torch.equal, own dtype": lambda: torch.equal(tensor, other),
    }


def cuda_candidates(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    from sparetrain_megatron.dmr import bits
    from sparetrain_megatron.dmr.fingerprint_triton import fingerprint, fingerprint_reference

    other, words = tensor.clone(), tensor.view(torch.int64)
    unaligned = tensor[1:]
    return {
        "plain read (int64 sum)": words.sum,
        "product: fingerprint": lambda: fingerprint(tensor),
        "product: fingerprint, odd address": lambda: fingerprint(unaligned),
        "product: bitwise equal": lambda: bits.equal(tensor, other),
        "mix in eager torch": lambda: fingerprint_reference(tensor),
        "XOR (torch.hash_tensor)": lambda: torch.hash_tensor(words),
    }


def seconds(call: Callable[[], object], device: str, budget: float) -> float:
    """Median seconds of a call; on a device, of its work there."""
    call()
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while len(times) < 5 or (time.perf_counter() < deadline and len(times) < 1000):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, nargs="+", default=[0.0625, 1, 16, 256])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU; default 1")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a figure; default 0.5")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    table: dict[str, dict[str, float]] = {}
    for mib in args.mib:
        tensor = torch.randn(int(mib * MIB) // 2, device=args.device).bfloat16()
        make = cuda_candidates if args.device == "cuda" else cpu_candidates
        for name, call in make(tensor).items():
            rate = 2 * tensor.numel() / seconds(call, args.device, args.budget) / 1e9
            table.setdefault(name, {})[f"{mib:g} MiB"] = round(rate, 2)

    columns = [f"{mib:g} MiB" for mib in args.mib]
    print(f"GB/s, bfloat16, {args.device}, {args.threads} thread(s), torch {torch.__version__}")
    print(f"{'':34}" + "".join(f"{column:>12}" for column in columns))
    for name, row in table.items():
        print(f"{name:34}" + "".join(f"{row[column]:12.1f}" for column in columns))
    if args.json:
        machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
        result = {
            "schema": 1,
            "benchmark": "fingerprint",
            "device": args.device,
            "machine": machine,
            "threads": args.threads,
            "torch": torch.__version__,
            "gigabytes_per_second": table,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
