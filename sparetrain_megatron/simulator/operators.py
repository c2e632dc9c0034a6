"""The operators of a transformer layer, forward, recompute and backward, as a profile's templates.

A forward is written down as a list of nodes; its backward follows from it in reverse, as autograd
would run it. Times are of one tensor-parallel rank and one microbatch.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from sparetrain_megatron.plan import Costs, External, InnerWindow, Operator, Template

from .layout import OPTIMIZER_BYTES, WEIGHT_BYTES, Layout, StageMemory
from .machine import Machine
from .model import Shape

Overlap = Literal["none", "backward", "async"]
"""What hides tensor-parallel collectives: nothing; what Megatron does in the backward (the
reduction behind the weight gradient); collective matrix products in both directions too."""

ASYNC_LEFT = 0.1
"""Share of a collective that stays exposed at least when it is cut up and overlapped."""

FLASH_BACKWARD = 2.5
"""FLOPs of fused attention's backward, in forwards: it computes the scores again."""


@dataclasses.dataclass(slots=True)
class Node:
    """One operator of a forward. Sizes in bytes, times in seconds."""

    name: str
    inputs: tuple[int, ...]
    written: int
    seconds: float
    kind: Literal["move", "mm", "collective"] = "move"
    grad: float = 0.0
    """Of its backward to each of its inputs together; for `mm`, of the input's gradient."""

    weight: float = 0.0
    """For `mm`: of the weight's gradient."""

    accumulate: float = 0.0
    """For `mm`: of adding that to the gradient buffer."""

    weight_bytes: int = 0
    saved: bool = True
    """Whether the backward needs the inputs."""

    window: str = "tensor"
    hidden_forward: bool = False
    """Whether a collective matrix product can hide it in the forward."""

    partner: float = 0.0
    """Time of the matrix product that would."""

    integer: bool = False


class Builder:
    """Writes the nodes of a forward. Value 0 is the region's input, node i gives value i + 1."""

    def __init__(
        self, machine: Machine, layout: Layout, first: int, overlap: Overlap, spread: float
    ) -> None:
        self.machine = machine
        self.layout = layout
        self.overlap = overlap
        self.spread = spread
        self.sizes = [first]
        self.nodes: list[Node] = []

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        self.sizes.append(node.written)
        return len(self.nodes)

    def move(self, name: str, inputs: tuple[int, ...], written: int, **more: bool) -> int:
        """An operator bound by memory."""
        moved = written + sum(self.sizes[i] for i in inputs)
        saved = more.get("saved", True)
        back = moved + (written if saved else 0)
        node = Node(name, inputs, written, self.machine.moving(moved), **more)  # type: ignore[arg-type]
        node.grad = self.machine.moving(back)
        return self._add(node)

    def mm(
        self, name: str, source: int, rows: int, inner: int, columns: int, share: float = 1.0
    ) -> int:
        """A product of [rows, inner] and a weight [inner, columns]."""
        flops = 2.0 * rows * inner * columns
        weight = 2 * inner * columns
        written = 2 * rows * columns
        product = self.machine.product(flops, 2 * rows * (inner + columns) + weight, share)
        return self._add(
            Node(
                name,
                (source,),
                written,
                product,
                "mm",
                grad=product,
                weight=product,
                # Reads the BF16 product, reads and writes the FP32 buffer.
                accumulate=self.machine.moving(weight / 2 * (2 + 8)),
                weight_bytes=weight,
            )
        )

    def attention(self, source: int, tokens: int, sequence: int, width: int) -> int:
        """Fused causal attention over `sequence`, `width` columns of heads here."""
        flops = 4.0 * tokens * sequence * width / 2
        moved = self.sizes[source] + 2 * tokens * width
        machine = self.machine
        node = Node("attention", (source,), 2 * tokens * width, 0.0)
        node.seconds = machine.product(flops, moved, machine.attention)
        node.grad = machine.product(FLASH_BACKWARD * flops, 3 * moved, machine.attention)
        return self._add(node)

    def collective(
        self, name: str, source: int, written: int, seconds: float, window: str = "tensor"
    ) -> int:
        """A collective inside the stage, whose time is a window."""
        node = Node(name, (source,), written, seconds, "collective", saved=False, window=window)
        node.grad = seconds
        return self._add(node)

    # --- templates ---------------------------------------------------------------------------

    def forward(self, phase: Literal["forward", "recompute"], recomputed: bool) -> Template:
        """The forward, or its recompute."""
        operators, windows = [], []
        for index, node in enumerate(self.nodes):
            inputs = tuple(value - 1 if value else ~0 for value in node.inputs)
            collective = node.kind == "collective"
            operators.append(
                Operator(
                    name=node.name,
                    seconds=0.0 if collective else node.seconds,
                    written=node.written,
                    held=sum(self.sizes[value] for value in node.inputs),
                    inputs=inputs,
                    recomputed=recomputed,
                    collective=collective,
                    integer=node.integer,
                )
            )
            if collective:
                hidden = self._neighbour(index) if self.overlap == "async" else 0.0
                windows += self._window(node, hidden, len(operators))
        return Template(
            phase=phase,
            operators=tuple(operators),
            externals=(External(bytes=self.sizes[0]),),
            windows=tuple(windows),
            name=phase,
        )

    def backward(self, source: Literal["recompute", "forward"]) -> Template:
        """The backward, which reads values of the recompute (or of the forward)."""
        externals = [External(bytes=self.sizes[-1])]
        operators: list[Operator] = []
        windows: list[InnerWindow] = []
        known: dict[int, int] = {}
        grads: dict[int, list[int]] = {len(self.nodes): [~0]}
        late = 0.0  # what runs beside the next collective

        def saved(value: int) -> int:
            if value not in known:
                at = value - 1 if value else ~0
                externals.append(External(bytes=self.sizes[value], phase=source, value=at))
                known[value] = ~(len(externals) - 1)
            return known[value]

        def size(value: int) -> int:
            return operators[value].written if value >= 0 else externals[~value].bytes

        def add(name: str, seconds: float, inputs: tuple[int, ...], written: int, **more) -> int:
            held = sum(size(value) for value in inputs)
            operators.append(
                Operator(
                    name=name, seconds=seconds, inputs=inputs, written=written, held=held, **more
                )
            )
            return len(operators) - 1

        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            flowing = grads.pop(index + 1, [])
            if not flowing:
                continue  # integer results have no gradient
            gradient = flowing[0]
            for other in flowing[1:]:
                both = (gradient, other)
                moved = 3 * self.sizes[index + 1]
                gradient = add("add", self.machine.moving(moved), both, self.sizes[index + 1])
            if node.kind == "collective":
                written = self.sizes[node.inputs[0]]
                result = add(f"{node.name}_grad", 0.0, (gradient,), written, collective=True)
                hidden = late if self.overlap != "none" else 0.0
                if self.overlap == "async" and not hidden:
                    hidden = self._neighbour(index)
                windows += self._window(node, hidden, len(operators))
                grads.setdefault(node.inputs[0], []).append(result)
                late = 0.0
                continue
            if node.kind == "mm":
                value = node.inputs[0]
                result = add("mm", node.grad, (gradient,), self.sizes[value])
                weight = add("mm", node.weight, (gradient, saved(value)), node.weight_bytes)
                add("add_", node.accumulate, (weight,), 0, mutating=True)
                grads.setdefault(value, []).append(result)
                late = node.weight
                continue
            if node.name == "add":  # the gradient of a sum is the gradient of both
                for value in node.inputs:
                    grads.setdefault(value, []).append(gradient)
                continue
            reads = tuple(saved(value) for value in node.inputs) if node.saved else ()
            value = node.inputs[0]
            result = add(f"{node.name}_backward", node.grad, (gradient, *reads), self.sizes[value])
            grads.setdefault(value, []).append(result)
        # What came back to the input by several ways.
        ways = grads.get(0, [])
        while len(ways) > 1:
            both = (ways.pop(0), ways.pop(0))
            ways.append(add("add", self.machine.moving(3 * self.sizes[0]), both, self.sizes[0]))
        return Template(
            phase="backward",
            operators=tuple(operators),
            externals=tuple(externals),
            windows=tuple(windows),
            name="backward",
        )

    def _neighbour(self, index: int) -> float:
        """Time of the matrix product next to a collective, which can hide it."""
        for near in (index + 1, index - 1):
            if 0 <= near < len(self.nodes) and self.nodes[near].kind == "mm":
                return self.nodes[near].seconds
        return 0.0

    def _window(self, node: Node, hidden: float, after: int) -> list[InnerWindow]:
        seconds = node.seconds
        if hidden and node.window == "tensor":
            left = ASYNC_LEFT * seconds if self.overlap == "async" else 0.0
            seconds = max(left, seconds - hidden)
        if not seconds:
            return []
        expert = node.window == "expert"
        layout = self.layout
        ranks = layout.expert if expert else layout.tensor
        return [
            InnerWindow(
                kind="intra" if self.machine.inside(ranks) else "inter",
                what="expert" if expert else "tensor",
                seconds=seconds,
                spread=seconds * self.spread if expert else 0.0,
                dynamic=expert,
                after=after,
            )
        ]


def layer(
    shape: Shape, layout: Layout, machine: Machine, overlap: Overlap, spread: float = 0.2
) -> tuple[Template, ...]:
    """A transformer layer: its forward, its backward, and, if it has one, its recompute between."""
    tensor = layout.tensor
    tokens = shape.sequence // layout.context * layout.micro_batch
    full = 2 * tokens * shape.hidden
    part = full // layout.sharded
    build = Builder(machine, layout, part, overlap, spread)

    def gather(value: int) -> int:
        if tensor == 1 or not layout.sequence_parallel:
            return value
        seconds = machine.link(tensor).all_gather(full, tensor)
        return build.collective("all_gather", value, full, seconds)

    def reduce(value: int) -> int:
        if tensor == 1:
            return value
        link = machine.link(tensor)
        if layout.sequence_parallel:
            seconds = link.all_gather(full, tensor)
            return build.collective("reduce_scatter", value, part, seconds)
        return build.collective("all_reduce", value, full, link.all_reduce(full, tensor))

    def mlp(value: int, width: int, rows: int, share: float = 1.0) -> int:
        value = build.mm("mm", value, rows, shape.hidden, shape.up * width, share)
        value = build.move("swiglu", (value,), 2 * rows * width)
        return build.mm("mm", value, rows, width, shape.hidden, share)

    value = build.move("rms_norm", (0,), part)
    value = build.mm(
        "mm", gather(value), tokens, shape.hidden, (shape.hidden + 2 * shape.kv) // tensor
    )
    value = build.move("rotary", (value,), build.sizes[value])
    if layout.context > 1:
        keys = 2 * tokens * 2 * shape.kv // tensor * layout.context
        link = machine.link(layout.context, tensor)
        value = build.collective(
            "all_gather", value, build.sizes[value], link.all_gather(keys, layout.context)
        )
    value = build.attention(value, tokens, shape.sequence, shape.hidden // tensor)
    value = reduce(build.mm("mm", value, tokens, shape.hidden // tensor, shape.hidden))
    middle = build.move("add", (value, 0), part, saved=False)
    value = build.move("rms_norm", (middle,), part)
    if shape.experts:
        value = _experts(build, shape, value, mlp, gather, reduce, tokens)
    else:
        value = reduce(mlp(gather(value), shape.ffn // tensor, tokens))
    build.move("add", (value, middle), part, saved=False)
    forward = build.forward("forward", layout.recompute)
    if not layout.recompute:
        return forward, build.backward("forward")
    return forward, build.forward("recompute", True), build.backward("recompute")


def _experts(build: Builder, shape: Shape, value: int, mlp, gather, reduce, tokens: int) -> int:
    """Router, experts behind two all-to-alls, and the shared expert beside them."""
    layout, machine = build.layout, build.machine
    mine = tokens // layout.sharded
    moved = 2 * mine * shape.topk * shape.hidden
    build.mm("mm", value, mine, shape.hidden, shape.experts)
    router = len(build.nodes)
    build.move("topk", (router,), 8 * mine * shape.topk, saved=False, integer=True)
    routed = build.move("permute", (value,), moved)
    ranks = layout.expert
    if ranks > 1:
        # The busiest rank decides: it gets more than the mean by the spread.
        seconds = machine.link(ranks).all_to_all(moved * (1 + build.spread), ranks)
        routed = build.collective("all_to_all", routed, moved, seconds, "expert")
    routed = mlp(routed, shape.ffn, mine * shape.topk, machine.grouped)
    if ranks > 1:
        routed = build.collective("all_to_all", routed, moved, seconds, "expert")
    routed = build.move("unpermute", (routed,), 2 * mine * shape.hidden)
    if not shape.shared:
        return routed
    shared = reduce(mlp(gather(value), shape.shared // layout.tensor, tokens))
    return build.move("add", (routed, shared), 2 * mine * shape.hidden, saved=False)


def embedding(
    shape: Shape, layout: Layout, machine: Machine, overlap: Overlap
) -> tuple[Template, Template]:
    """The embedding's forward and backward, on the first stage."""
    tokens = shape.sequence // layout.context * layout.micro_batch
    full = 2 * tokens * shape.hidden
    build = Builder(machine, layout, 8 * tokens, overlap, 0.0)
    value = build.move("embedding", (0,), full)
    if layout.tensor > 1:
        seconds = machine.link(layout.tensor).all_gather(full, layout.tensor)
        build.collective("reduce_scatter", value, full // layout.sharded, seconds)
    forward = build.forward("forward", False)
    collective = list(forward.windows)
    gradient = External(bytes=full // layout.sharded)
    add = Operator(
        name="index_add_", seconds=machine.moving(3 * full), inputs=(~0,), held=full, mutating=True
    )
    windows = tuple(w.model_copy(update={"after": 0}) for w in collective)
    backward = Template(
        phase="backward", operators=(add,), externals=(gradient,), windows=windows, name="backward"
    )
    return forward, backward


def head(
    shape: Shape, layout: Layout, machine: Machine, overlap: Overlap
) -> tuple[Template, Template]:
    """The last norm, the head and the loss, on the last stage; not recomputed."""
    tokens = shape.sequence // layout.context * layout.micro_batch
    full = 2 * tokens * shape.hidden
    build = Builder(machine, layout, full // layout.sharded, overlap, 0.0)
    value = build.move("rms_norm", (0,), full // layout.sharded)
    if layout.tensor > 1 and layout.sequence_parallel:
        seconds = machine.link(layout.tensor).all_gather(full, layout.tensor)
        value = build.collective("all_gather", value, full, seconds)
    value = build.mm("mm", value, tokens, shape.hidden, shape.vocabulary // layout.tensor)
    value = build.move("cast", (value,), 2 * build.sizes[value], saved=False)
    build.move("cross_entropy", (value,), 4 * tokens)
    return build.forward("forward", False), build.backward("forward")


def update(memory: StageMemory, machine: Machine) -> tuple[Template, Template]:
    """Clipping and the optimizer's step of one rank."""
    gradients = 4 * memory.updated
    clip = Template(
        phase="clip",
        operators=(
            Operator(name="norm", seconds=machine.moving(gradients), written=4),
            Operator(name="mul_", seconds=machine.moving(2 * gradients), written=0, mutating=True),
        ),
        name="clip",
    )
    # Reads gradient, master and moments, writes master, moments and the BF16 parameter.
    moved = (4 + 2 * OPTIMIZER_BYTES + 2) * memory.updated
    # A second execution works on copies of what it would overwrite.
    adam = Operator(
        name="adam_",
        seconds=machine.moving(moved),
        check=machine.moving(moved + 2 * OPTIMIZER_BYTES * memory.updated),
        mutating=True,
    )
    return clip, Template(phase="optimizer", operators=(adam,), name="optimizer")


def costs(machine: Machine, fingerprints: bool, record: float) -> Costs:
    """What protection itself costs: fingerprints read every checked value once."""
    return Costs(record=record, fingerprint=1 / machine.memory_rate if fingerprints else 0.0)


def with_comparison(template: Template, machine: Machine) -> Template:
    """The same template with checks that read both results once more."""
    operators = tuple(
        operator
        if operator.collective
        else operator.model_copy(
            update={"check": operator.seconds + 2 * operator.written / machine.memory_rate}
        )
        for operator in template.operators
    )
    return template.model_copy(update={"operators": operators})


def gradient_bytes(memory: StageMemory) -> float:
    """What a data-parallel reduction moves: FP32 gradients."""
    return memory.parameters * (WEIGHT_BYTES - 2)
