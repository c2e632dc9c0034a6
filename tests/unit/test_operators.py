"""Classes of operators."""

import pytest
import torch

from sparetrain_megatron.dmr import operators
from sparetrain_megatron.dmr.engine import Engine, UnprotectedOperator
from sparetrain_megatron.dmr.operators import Kind, describe
from sparetrain_megatron.faults.injector import Injector
from sparetrain_megatron.report.summary import Statistics

aten = torch.ops.aten
CLASSES = {
    Kind.VIEW: [
        aten.view.default,
        aten.t.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.detach.default,
        aten.alias.default,
        aten._unsafe_view.default,  # its schema does not say so
        aten.as_strided.default,
    ],
    Kind.METADATA: [aten.set_.source_Storage, aten.t_.default, aten.detach_.default],
    Kind.UNINITIALISED: [aten.empty.memory_format, aten.empty_like.default, aten.resize_.default],
    Kind.PURE: [
        aten.mm.default,
        aten.add.Tensor,
        aten.clone.default,
        aten._to_copy.default,
        aten.native_layer_norm.default,
        aten._softmax.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.native_dropout.default,
        aten.zeros.default,
        aten._foreach_norm.Scalar,
        aten.topk.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.prims.convert_element_type.default,
    ],
    Kind.MUTATING: [
        aten.add_.Tensor,
        aten.copy_.default,
        aten.zero_.default,
        aten.addcdiv_.default,
        aten.index_put_.default,
        aten._foreach_addcdiv_.ScalarList,
        aten.mm.out,
        aten.uniform_.default,
        aten.native_batch_norm.default,  # writes running statistics, which its schema hides
        aten._fused_adamw_.default,
    ],
    Kind.SCALAR: [aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default],
    Kind.COLLECTIVE: [torch.ops.c10d.allreduce_.default],
}


@pytest.mark.parametrize(
    ("func", "kind"), [(f, kind) for kind, funcs in CLASSES.items() for f in funcs], ids=str
)
def test_class(func, kind):
    assert describe(func).kind is kind


@pytest.mark.parametrize(
    ("func", "random"),
    [
        (aten.native_dropout.default, True),
        (aten.bernoulli_.float, True),
        (aten.randn.default, True),
        (aten._scaled_dot_product_flash_attention.default, True),
        (aten.mm.default, False),
        (aten.add_.Tensor, False),
    ],
    ids=str,
)
def test_random(func, random):
    assert describe(func).random is random


def test_what_is_written():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)

    def written(func, *args, **kwargs):
        return describe(func).written_tensors(args, kwargs)

    assert written(aten.add_.Tensor, a, b)[0] is a
    assert len(written(aten.add_.Tensor, a, b)) == 1
    assert written(aten.mm.out, a, b, out=c)[0] is c
    found = written(aten._foreach_add_.List, [a, b], [c, c])
    assert [t.numel() for t in found] == [1, 2]
    # Running statistics of a batch norm may be given by position or by name, or be absent.
    norm = aten.native_batch_norm.default
    assert [t.numel() for t in written(norm, a, None, None, b, c, True, 0.1, 1e-5)] == [2, 3]
    assert written(norm, a, None, None, None, None, True, 0.1, 1e-5) == []
    adam = written(aten._fused_adamw_.default, [a], [b], [c], [c], [], [c])
    assert [t.numel() for t in adam] == [1, 2, 3, 3]


def test_only_elementwise_operators_are_cut():
    assert describe(aten.add_.Tensor).elementwise
    assert describe(aten.copy_.default).elementwise
    for func in (aten.uniform_.default, aten.index_put_.default, aten.mm.out, aten.addmm_.default):
        assert not describe(func).elementwise


def test_higher_order_operators_are_unknown():
    assert describe(torch.ops.higher_order.cond).kind is Kind.UNKNOWN


def test_every_aten_operator_of_this_torch_has_a_class():
    """No operator of ATen may fall through, and none that writes may count as pure."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        try:
            func = getattr(getattr(aten, base), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # declared for TorchScript only
        operator = describe(func)
        assert operator.kind is not Kind.UNKNOWN, name
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if operator.kind in (Kind.PURE, Kind.SCALAR, Kind.VIEW):
            assert not writes, name
        if operator.kind is Kind.MUTATING and writes:
            assert operator.written or operator.written_keywords, name


@pytest.fixture(scope="module")
def library():
    """A namespace that nobody vouches for, with one operator."""
    fragment = torch.library.Library("sparetrain_test", "FRAGMENT")
    fragment.define("double(Tensor x) -> Tensor")
    fragment.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    yield "sparetrain_test"
    fragment._destroy()


@pytest.fixture
def unvouched():
    """Takes back what a test vouches for."""
    before = set(operators._vouched)
    yield
    operators._vouched.clear()
    operators._vouched.update(before)
    operators._known.clear()


def protected(call, strict):
    """Runs a call under an engine of its own; returns its result and the counters."""
    statistics = Statistics()
    engine = Engine(statistics, Injector([], 0), strict=strict)
    with engine.active():
        result = call()
    engine.verdict()
    return result, statistics


def test_an_unknown_namespace_is_refused(library):
    with pytest.raises(UnprotectedOperator, match="sparetrain_test::double"):
        protected(lambda: torch.ops.sparetrain_test.double(torch.ones(3)), strict=True)


def test_an_unknown_namespace_is_counted(library):
    result, statistics = protected(
        lambda: torch.ops.sparetrain_test.double(torch.ones(3)), strict=False
    )
    assert result.tolist() == [2, 2, 2]
    assert statistics.unprotected == {"sparetrain_test::double": 1}


@pytest.mark.parametrize("name", ["sparetrain_test", "sparetrain_test::double"])
def test_vouched(library, unvouched, name):
    operators.vouch(name)
    result, statistics = protected(
        lambda: torch.ops.sparetrain_test.double(torch.ones(3)), strict=True
    )
    assert result.tolist() == [2, 2, 2]
    assert statistics.unprotected == {}
    assert statistics.checks["naive"]["pure"] == 2  # ones and double


def test_vouching_for_another_operator_does_not_help(library, unvouched):
    operators.vouch("sparetrain_test::triple")
    with pytest.raises(UnprotectedOperator):
        protected(lambda: torch.ops.sparetrain_test.double(torch.ones(3)), strict=True)


@pytest.mark.parametrize("where", ["argument", "list", "keyword"])
def test_sparse_tensors_are_unprotected(where):
    sparse = torch.eye(3).to_sparse()
    calls = {
        "argument": lambda: torch.mm(sparse, torch.ones(3, 3)),
        "list": lambda: torch._foreach_mul_([sparse], 2.0),
        "keyword": lambda: torch.ops.aten.add.Tensor(sparse, other=sparse),
    }
    with pytest.raises(UnprotectedOperator):
        protected(calls[where], strict=True)
