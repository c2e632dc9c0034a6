"""Classes of operators, read from their schemas, and the exceptions that a schema doesn't tell.

An operator's class decides how it is run a second time. It is an allow-list: an operator whose
namespace is not known to have honest schemas is :attr:`Kind.UNKNOWN`, and an unknown operator is
counted and, in strict mode, refused; it is never passed over in silence.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch


class Kind(enum.Enum):
    """How an operator is executed a second time."""

    VIEW = "view"  # aliases its input and computes nothing: runs once
    METADATA = "metadata"  # changes or reads sizes, storages, flags: runs once
    UNINITIALISED = "uninitialised"  # allocates; what it returns has no defined value: runs once
    COLLECTIVE = "collective"  # moves or reduces between ranks: see collectives.py
    PURE = "pure"  # reads tensors, returns fresh ones: runs twice
    MUTATING = "mutating"  # writes an argument: the checker runs first, on copies
    SCALAR = "scalar"  # returns a number: runs twice
    COMPILED = "compiled"  # a graph that torch.compile made, forward or backward: runs twice
    UNKNOWN = "unknown"  # nothing is known: unprotected


RUN_ONCE = (Kind.VIEW, Kind.METADATA, Kind.UNINITIALISED)

# Namespaces whose schemas declare every write and every alias (with the exceptions below).
HONEST_NAMESPACES = {"aten", "prims"}
COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional"}
SIDE_NAMESPACES = {"profiler"}

_UNINITIALISED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::resize_as_",
    "aten::_efficientzerotensor",
}
_METADATA = {
    "aten::set_",
    "aten::record_stream",
    "aten::detach_",
    "aten::requires_grad_",
    "aten::retain_grad",
    "aten::_version",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::_has_compatible_shallow_copy_type",
    "aten::sym_size",
    "aten::sym_stride",
    "aten::sym_numel",
    "aten::sym_storage_offset",
    "aten::is_contiguous",
    "aten::is_non_overlapping_and_dense",
}
# These return an alias of their input although the schema does not say so.
_UNDECLARED_VIEWS = {"aten::_unsafe_view"}
# These write running statistics although the schema does not say so: (position, name) of arguments.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ((3, "running_mean"), (4, "running_var")),
    "aten::cudnn_batch_norm": ((3, "running_mean"), (4, "running_var")),
    "aten::miopen_batch_norm": ((3, "running_mean"), (4, "running_var")),
}
# Outputs with no defined value: random-number bookkeeping and debug buffers of fused attention.
_UNDEFINED_OUTPUTS = {
    "aten::_scaled_dot_product_flash_attention": (6, 7, 8),
    "aten::_scaled_dot_product_efficient_attention": (2, 3),
    "aten::_scaled_dot_product_cudnn_attention": (6, 7, 8),
    "aten::_flash_attention_forward": (2, 3, 4),
    "aten::_efficient_attention_forward": (2, 3),
}
# Elementwise in place: the value at an index depends on nothing but that index of each argument, so
# the checker may run on one slice of the tensors at a time.
_ELEMENTWISE = {
    "aten::" + name
    for name in (
        "add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ sqrt_ neg_ abs_ clamp_ copy_ zero_ fill_"
    ).split()
}


@dataclasses.dataclass(slots=True, frozen=True, eq=False)
class Operator:
    """What is known of one operator overload.

    Attributes:
        name: Short name, ``mm`` for ``aten::mm.default``.
        kind: How it is run a second time.
        random: It draws from a generator.
        written: Positional arguments it writes, as (position, name).
        written_keywords: Keyword-only arguments it writes (``out=``).
        fresh: It returns at least one value that is not an alias of an argument.
        undefined_outputs: Positions of outputs that have no defined value.
        elementwise: A mutating operator that may be checked slice by slice.
    """

    name: str
    kind: Kind
    random: bool = False
    written: tuple[tuple[int, str], ...] = ()
    written_keywords: tuple[str, ...] = ()
    fresh: bool = True
    undefined_outputs: tuple[int, ...] = ()
    elementwise: bool = False
    mutating: bool = dataclasses.field(init=False)
    runs_once: bool = dataclasses.field(init=False)
    kind_name: str = dataclasses.field(init=False)
    """What it counts as in reports."""

    def __post_init__(self) -> None:
        # Asked for every operator of the step.
        kind = self.kind
        object.__setattr__(self, "mutating", kind is Kind.MUTATING)
        object.__setattr__(self, "runs_once", kind in RUN_ONCE)
        object.__setattr__(self, "kind_name", "random" if self.random else kind.value)

    def written_tensors(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call with these arguments writes, lists flattened."""
        found: list[torch.Tensor] = []
        for position, name in self.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            _collect(value, found)
        for name in self.written_keywords:
            _collect(kwargs.get(name), found)
        return found


def ignores_first(operator: Operator, kwargs: dict[str, Any]) -> bool:
    """Whether a call does not read its first argument: a ``beta = 0`` product's scratch buffer."""
    return operator.name in ("addmm", "baddbmm") and kwargs.get("beta", 1) == 0


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, dict):
            value = list(value.values())
        _collect(value, found)
    return found


def nested_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a module's inputs or outputs: lists, tuples and dicts at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in nested_tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in nested_tensors(item)]
    return []


_known: dict[Any, Operator] = {}
_vouched: set[str] = set()


def vouch(name: str) -> None:
    """Declare that a ``torch.library`` operator's schema tells all it reads, writes and draws.

    Args:
        name: A namespace (``"mylib"``) or one operator (``"mylib::op"``).
    """
    _vouched.add(name)
    _known.clear()


def describe(func: Any) -> Operator:
    """The :class:`Operator` of a dispatched function; cached."""
    operator = _known.get(func)
    if operator is None:
        operator = _known[func] = _classify(func)
    return operator


def _classify(func: Any) -> Operator:
    if not isinstance(func, torch._ops.OpOverload):
        return Operator(str(func), Kind.UNKNOWN)  # higher-order operators
    schema = func._schema
    name, namespace = schema.name, func.namespace
    short = name.split("::", 1)[-1]
    if namespace in COLLECTIVE_NAMESPACES:
        return Operator(short, Kind.COLLECTIVE)
    if namespace in SIDE_NAMESPACES:
        return Operator(short, Kind.METADATA)
    if namespace not in HONEST_NAMESPACES and not ({namespace, name} & _vouched):
        return Operator(name, Kind.UNKNOWN)
    if name in _UNINITIALISED:
        return Operator(short, Kind.UNINITIALISED)
    if name in _METADATA or torch.Tag.inplace_view in func.tags:
        return Operator(short, Kind.METADATA)
    if name in _UNDECLARED_VIEWS and not func._overloadname.endswith("out"):
        return Operator(short, Kind.VIEW)

    written, keywords = list(_UNDECLARED_WRITES.get(name, ())), []
    reads_alias = False
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        if not alias.is_write:
            reads_alias = True
        elif argument.kwarg_only:
            keywords.append(argument.name)
        else:
            written.append((position, argument.name))
    random = torch.Tag.nondeterministic_seeded in func.tags
    undefined = _UNDEFINED_OUTPUTS.get(name, ())
    fresh = any(r.alias_info is None for r in schema.returns)
    if written or keywords:
        return Operator(
            short,
            Kind.MUTATING,
            random,
            tuple(written),
            tuple(keywords),
            fresh,
            undefined,
            name in _ELEMENTWISE and not random,
        )
    if reads_alias and any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
        return Operator(short, Kind.VIEW)
    # `contains` sees through Optional and List types; a return that holds no tensor is a number.
    if not any("Tensor" in str(r.type) for r in schema.returns):
        return Operator(short, Kind.SCALAR if schema.returns else Kind.METADATA, random)
    return Operator(short, Kind.PURE, random, fresh=fresh, undefined_outputs=undefined)
