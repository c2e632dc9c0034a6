"""Fingerprints on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.dmr import bits
from sparetrain_megatron.dmr.fingerprint import fingerprint, mix
from sparetrain_megatron.faults.corrupt import width
from tests.unit.test_bits import DTYPES, LAYOUTS, flip, random_bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_bit_counts(dtype, data):
    tensor = random_bits(dtype, 7, 9, seed=data.draw(st.integers(0, 99)))
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    element = data.draw(st.integers(0, 62))
    bit = data.draw(st.integers(0, width(dtype) - 1))
    assert fingerprint(tensor) != fingerprint(flip(tensor, element, bit))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_count(dtype):
    """Exchanged elements, shifted rows and exchanged rows are seen: a plain sum would not."""
    tensor = random_bits(dtype, 6, 4, seed=5)
    integers = bits.as_integers(tensor)
    digests = {fingerprint(tensor)}
    for changed in (integers.roll(1, 0), integers.roll(1, 1), integers.flip(0), integers.flip(1)):
        digests.add(fingerprint(changed.contiguous()))
    assert len(digests) == 5


@given(st.lists(st.integers(-128, 127), min_size=2, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_exchanging_any_two_elements_counts(values, data):
    i = data.draw(st.integers(0, len(values) - 1))
    j = data.draw(st.integers(0, len(values) - 1))
    swapped = list(values)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    a, b = (torch.tensor(v, dtype=torch.int8) for v in (values, swapped))
    assert (fingerprint(a) == fingerprint(b)) is (values == swapped)


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"transposed", "permuted"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_layouts_without_gaps_in_order(name, dtype):
    """The fingerprint is of the values in row-major order, wherever they lie."""
    view = LAYOUTS[name](random_bits(dtype, 6, 4))
    compact = bits.as_integers(view).contiguous().view(dtype)
    assert fingerprint(view) == fingerprint(compact)


@pytest.mark.parametrize("name", ["transposed", "permuted"])
def test_dense_layouts_are_read_in_memory_order(name):
    """Both executions have the same layout, so the order does not matter; every element does."""
    base = random_bits(torch.float32, 6, 4)
    digest = fingerprint(LAYOUTS[name](base))
    assert digest == fingerprint(base)  # so nothing is copied
    assert digest == fingerprint(LAYOUTS[name](base.clone()))
    for element in range(base.numel()):
        assert digest != fingerprint(LAYOUTS[name](flip(base, element, 30)))


def test_memory_outside_a_view_does_not_count():
    base = random_bits(torch.int64, 6, 4)
    views = [base[:, ::2], base[1:3], base[:, 1:3]]
    before = [fingerprint(v) for v in views]
    base[5, 3] ^= 1
    assert [fingerprint(v) for v in views] == before
    base[1, 2] ^= 1
    assert all(fingerprint(v) != b for v, b in zip(views, before, strict=True))


def test_signed_zero_nan_and_conjugates():
    zero = torch.zeros(4)
    assert fingerprint(zero) != fingerprint(-zero)
    nan = torch.full((4,), float("nan"))
    assert fingerprint(nan) == fingerprint(nan.clone())
    value = random_bits(torch.complex64, 4)
    assert fingerprint(value.conj()) == fingerprint(value.conj().resolve_conj())
    assert fingerprint(value.conj()) != fingerprint(value)


def test_empty():
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(3, 0))


def test_mix_depends_on_value_and_index():
    words = {mix(value, index) for value in range(50) for index in range(50)}
    assert len(words) == 2500
    assert all(0 <= word < 1 << 64 for word in words)
