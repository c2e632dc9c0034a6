"""Comparing and copying tensors bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparetrain_megatron.dmr import bits
from sparetrain_megatron.faults.corrupt import width

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor with every bit random: NaN with payloads, infinities and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def flip(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """A copy of a contiguous tensor with one bit flipped, by plain bytes."""
    raw = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_bit_of_every_element_counts(dtype, data):
    tensor = random_bits(dtype, 3, 5, seed=data.draw(st.integers(0, 99)))
    assert bits.equal(tensor, tensor.clone()) is True
    element = data.draw(st.integers(0, 14))
    bit = data.draw(st.integers(0, width(dtype) - 1))
    other = flip(tensor, element, bit)
    assert bits.equal(tensor, other) is False
    count, elements, positions = bits.difference(tensor, other)
    assert count == 1
    if not dtype.is_complex:
        assert (elements, positions) == (15, [bit])


def test_nan_equals_itself_and_zeros_differ():
    nan = torch.tensor([float("nan")])
    assert bits.equal(nan, nan.clone())
    assert not bits.equal(nan, flip(nan, 0, 3))  # another payload
    assert not bits.equal(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize(
    "other",
    [torch.zeros(2, 3), torch.zeros(3, 2).double(), torch.zeros(3, 2).int()],
    ids=["shape", "width", "type"],
)
def test_other_shapes_and_types_differ(other):
    assert bits.equal(torch.zeros(3, 2), other) is False


def test_empty_tensors_are_equal():
    assert bits.equal(torch.zeros(0, 3), torch.ones(0, 3)) is True


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t[1:, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 7),
    "scalar": lambda t: t[2, 3],
    "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_layouts(name, dtype):
    """Values are compared, wherever they lie; memory between them is not."""
    base = random_bits(dtype, 6, 4)
    view = LAYOUTS[name](base)
    compact = bits.as_integers(view).contiguous().view(dtype)
    assert bits.equal(view, compact) is True
    assert bits.equal(compact, view) is True
    changed = flip(compact, view.numel() - 1, 2)
    assert bits.equal(view, changed) is False
    assert bits.difference(view, changed)[::2] == (1, [2])


def test_memory_between_the_elements_is_not_compared():
    a, b = torch.zeros(4, 4), torch.ones(4, 4)
    b[:, ::2] = 0
    assert bits.equal(a[:, ::2], b[:, ::2]) is True


def test_lazily_conjugated_and_negated():
    a = random_bits(torch.complex64, 5)
    assert bits.equal(a.conj(), a.conj().resolve_conj()) is True
    assert bits.equal(a.conj(), a) is False
    imaginary = a.conj().imag  # has the negative bit
    assert imaginary.is_neg()
    assert bits.equal(imaginary, imaginary.resolve_neg()) is True
    assert bits.equal(imaginary, a.imag) is False


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), True),
        (torch.zeros(()), True),
        (torch.zeros(3, 1, 4), True),
        (torch.zeros(3, 4)[:, ::2], False),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(3, 4)[1:], True),
        (torch.zeros(3, 1).expand(3, 4), False),
    ],
)
def test_dense(tensor, expected):
    assert bits.dense(tensor) is expected


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    start=st.integers(0, 40),
    order=st.randoms(),
)
@settings(max_examples=50, deadline=None)
def test_clone_span(shape, start, order):
    """A copy has the same values, strides and alignment, and memory of its own."""
    numel = 1
    for n in shape:
        numel *= n
    memory = random_bits(torch.int32, numel + start)
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = memory[start:].view(shape).permute(dims)
    copy = bits.clone_span(tensor)
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(copy, tensor)
    copy.fill_(0)
    assert torch.equal(memory, random_bits(torch.int32, numel + start))


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"expanded"}))
def test_clone_span_of_views_copies_the_view_alone(name):
    view = LAYOUTS[name](random_bits(torch.bfloat16, 6, 4))
    copy = bits.clone_span(view)
    assert bits.equal(copy, view) is True
    assert copy.stride() == view.stride()
    assert copy.untyped_storage().nbytes() <= 2 * bits.span(view) + 64


def test_clone_span_of_nothing():
    assert bits.clone_span(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("wrong", range(3))
def test_majority(dtype, wrong):
    right = random_bits(dtype, 9)
    votes = [right.clone() for _ in range(3)]
    votes[wrong] = flip(right, 4, 0)
    result = bits.majority(votes)
    assert result.dtype is dtype
    assert torch.equal(result, right)
