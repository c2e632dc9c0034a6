"""The Triton fingerprint against its reference: in Triton's interpreter, and on a card."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from sparetrain_megatron.dmr.fingerprint_triton import fingerprint, fingerprint_reference

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def compare(device: str) -> int:
    """Compares kernel and reference on tensors of many kinds; returns how many were compared."""
    compared = 0
    for dtype in DTYPES:
        for size in (0, 1, 3, 8, 1023, 4096, 5003, 40003):
            memory = torch.randint(0, 2, (size + 3,), dtype=torch.uint8)
            if dtype is not torch.bool:
                memory = torch.randint(0, 256, ((size + 3) * dtype.itemsize,), dtype=torch.uint8)
            tensor = memory.view(dtype).to(device)
            cases = [tensor[:size], tensor[3:], tensor[: size // 2 * 2].reshape(-1, 2).t()]
            if size:
                cases += [tensor[0], tensor[::2], tensor[:size].expand(2, -1)]
            if dtype.is_complex:
                cases.append(tensor.conj())
            for case in cases:
                result = fingerprint(case)
                assert result.dtype is torch.int64 and result.dim() == 0
                assert result.device == tensor.device
                expected = fingerprint_reference(case)
                assert torch.equal(result, expected), (dtype, size, case.stride())
                compared += 1
    return compared


def test_interpreted_kernel_equals_the_reference():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = "from tests.unit.test_fingerprint_triton import compare; print(compare('cpu'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


@pytest.mark.gpu
def test_kernel_equals_the_reference_on_a_device():
    assert compare("cuda") > 300


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_reference_values():
    """Written down, so that fingerprints of different versions can be compared."""

    def mix(value: int, index: int) -> int:
        mask = (1 << 64) - 1
        z = (value + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    values = [0, 1, 2**63 - 1, 12345678901234567]
    expected = sum(mix(v, i) for i, v in enumerate(values)) % 2**64
    assert fingerprint_reference(words(*values)).item() % 2**64 == expected
    assert fingerprint_reference(torch.zeros(1)).item() % 2**64 == 0xE220A8397B1DCDAF


def test_position_enters():
    original = torch.randn(64, 32)
    base = fingerprint_reference(original).item()
    swapped_rows = original[[1, 0, *range(2, 64)]]
    swapped_elements = original.clone()
    swapped_elements[0, [0, 1]] = original[0, [1, 0]]
    others = [swapped_rows, swapped_elements, -original, original.roll(1), original.roll(1, 0)]
    values = [fingerprint_reference(other).item() for other in others]
    assert len({base, *values}) == len(others) + 1


def test_every_bit_enters():
    tensor = torch.randn(16)
    seen = {fingerprint_reference(tensor).item()}
    for element in range(16):
        for bit in range(32):
            changed = tensor.clone()
            changed.view(torch.int32)[element] ^= -(1 << 31) if bit == 31 else 1 << bit
            seen.add(fingerprint_reference(changed).item())
    assert len(seen) == 1 + 16 * 32


def test_two_flips_of_the_top_bit_do_not_cancel():
    top = -(2**63)
    assert fingerprint_reference(words(0, 0)) != fingerprint_reference(words(top, top))


@pytest.mark.parametrize(("pointer", "per_word", "alone"), [("*u64", 1, False), ("*u16", 4, True)])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_compiles_for_devices_that_are_not_here(capability, pointer, per_word, alone):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from sparetrain_megatron.dmr.fingerprint_triton import _fingerprint_kernel

    source = ASTSource(
        fn=_fingerprint_kernel,
        signature={
            "data": pointer,
            "out": "*i64",
            "units": "i64",
            "words": "i32",
            **dict.fromkeys(("PER_WORD", "BLOCK", "ALONE"), "constexpr"),
        },
        constexprs={"PER_WORD": per_word, "BLOCK": 1024, "ALONE": alone},
    )
    compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert ("atom" in compiled.asm["ptx"]) is not alone
