"""Blocks that run the same operators every time: recorded once, then only bound."""

import pytest
import torch

from sparetrain_megatron.dmr.fingerprint import fingerprint
from sparetrain_megatron.dmr.template import SAMPLE, geometry, make, same_operators
from tests.unit.protected import Watched


@pytest.fixture(autouse=True)
def generator():
    """Leaves torch's generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


class Layer:
    """A block without dropout, its gradient buffers, and what an adapter does around it.

    Args:
        engine: The engine, whose tapes and templates are used.
        body: Computes the output from the input and the layer's parameters.
    """

    def __init__(self, engine, body=None):
        self.engine = engine
        self.weights = [
            torch.nn.Parameter(torch.randn(6, 12)),
            torch.nn.Parameter(torch.randn(12, 6)),
        ]
        self.buffer = torch.zeros(2, 72)
        self.main = [g.view(w.shape) for g, w in zip(self.buffer, self.weights)]
        self.body = body or self.mlp
        engine.mark_accumulators([self.buffer])
        engine.deferred.mark_constants([w.detach() for w in self.weights])
        for weight, main in zip(self.weights, self.main):
            weight.register_post_accumulate_grad_hook(lambda w, main=main: self.accumulate(w, main))

    @staticmethod
    def mlp(x, up, down):
        return x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (6,)) @ up) @ down

    def accumulate(self, weight, main):
        """As the hook of a framework does."""
        self.engine.gradient_ready(main.data_ptr(), weight.grad)
        with self.engine.seen():
            main.add_(weight.grad)
        weight.grad = None

    def backward(self, x, gradient):
        """Recompute and backward; returns the input's gradient."""
        self.given = x.detach().requires_grad_()
        with self.engine.at(phase="recompute"), torch.enable_grad():
            output = self.body(self.given, *self.weights)
        with torch.no_grad():
            self.output(output)
        with self.engine.at(phase="backward"):
            torch.autograd.backward([output], [gradient])
        return self.given.grad

    def output(self, output):
        digest = fingerprint(output)
        if self.engine.binding is not None:
            self.engine.binding["output", 0] = digest
        elif self.engine.tape is not None:
            self.engine.tape.mark(output, digest, ("output", 0))

    def record(self, x, gradient):
        """A run with a tape; returns the input's gradient and the template, if one can be made."""
        engine = self.engine
        engine.closed.clear()
        with engine.active():
            engine.open_tape()
            result = self.backward(x, gradient)
            engine.close_tape([result])
        tapes = list(engine.closed)
        self.tape = tapes[0]
        if len(tapes) != 1:
            return result, None
        return result, make(tapes[0], [self.given], [gradient], engine.deferred.constants)

    def bind(self, template, x, gradient):
        """A run without a tape."""
        engine = self.engine
        engine.binding = digests = {}
        with engine.active():
            with engine.unseen():
                result = self.backward(x, gradient)
            engine.binding = None
            self.digests = digests
            engine.push_bound(template, [self.given], [gradient], digests, [result])
        return result


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)


@pytest.fixture
def bound():
    """A layer with a template, whose recorded run has been checked."""
    layer = Layer(Watched(repairs=False))
    _, template = layer.record(*values(1))
    assert template is not None
    assert not layer.engine.verdict().dirty
    return layer, template


def test_a_bound_run_is_checked_and_bitwise_the_same(bound):
    layer, template = bound
    before = layer.buffer.clone()
    results = []
    for run in (lambda: layer.bind(template, *values(2)), lambda: layer.record(*values(2))[0]):
        layer.buffer.copy_(before)
        results.append((run().clone(), layer.buffer.clone()))
        assert layer.engine.deferred
        entries = layer.engine.deferred.operators["drained"]
        assert not layer.engine.verdict().dirty
        assert layer.engine.deferred.operators["drained"] - entries == len(template.entries) + 1
    assert all(map(torch.equal, *results))
    assert layer.engine.counters.checks["deferred"]["pure"] >= 3 * template.computing - 3
    # Gradients are accumulated under the interceptor's eyes.
    assert layer.engine.counters.checks["naive"] == {"mutating": 6}


def test_no_python_per_operator(bound):
    layer, template = bound
    watched = []
    layer.engine.observer = type(
        "Observer",
        (),
        {
            "watch": lambda self, handler, operator, func, args, kwargs: (
                watched.append(operator.name),
                handler(operator, func, args, kwargs),
            )[1]
        },
    )()
    layer.bind(template, *values(2))
    assert watched == ["add_", "add_"]


@pytest.mark.parametrize("what", ["gradient", "accumulate", "output", "result", "digest"])
def test_what_leaves_wrongly_is_found(bound, what):
    layer, template = bound
    engine = layer.engine
    if what == "gradient":
        # The primary's own incoming gradient differs from the one that is held.
        x, gradient = values(2)
        engine.binding = digests = {}
        with engine.active():
            with engine.unseen():
                result = layer.backward(x, gradient)
            engine.binding = None
            other = gradient.clone()
            other[1, 2] *= 2
            engine.push_bound(template, [layer.given], [other], digests, [result])
    elif what == "digest":
        layer.bind(template, *values(2))
        (tape,) = engine.deferred._pending
        leaving = next(v for group in tape._checks.values() for v in group)
        leaving.digest ^= 1
    else:
        x, gradient = values(2)
        original = Layer.accumulate
        if what == "output":
            layer.output = lambda out: (out.view(-1)[3:4].mul_(-1), Layer.output(layer, out))
        elif what == "accumulate":

            def accumulate(weight, main):
                weight.grad.view(-1)[7:8].mul_(1.5)
                original(layer, weight, main)

            layer.accumulate = accumulate
        else:
            backward = layer.backward
            layer.backward = lambda x, g: backward(x, g).mul_(1.25)
        layer.bind(template, x, gradient)
    assert engine.verdict().dirty
    mismatch = engine.found[0]
    assert (mismatch.method, mismatch.wrong) == ("deferred", "primary")


@pytest.mark.parametrize("kind", ["input", "gradient", "constant"])
def test_what_is_held_wrongly_is_found(bound, kind):
    layer, template = bound
    layer.bind(template, *values(2))
    (tape,) = layer.engine.deferred._pending
    (slot, *_) = [i for i, s in enumerate(template.sources) if s is not None and s[0] == kind]
    held = tape.held[slot]
    damaged = held.clone()
    damaged.view(-1)[4] += 1
    tape.held[slot] = damaged
    assert layer.engine.verdict().dirty
    assert layer.engine.found[0].method == "deferred"


def test_a_bound_boundary_is_copied_before_it_is_written(bound):
    layer, template = bound
    x, gradient = values(2)
    layer.bind(template, x, gradient)
    assert layer.engine.deferred.held_bytes == template.held_bytes
    with layer.engine.active():
        layer.given.detach().add_(1)
        gradient.zero_()
    assert not layer.engine.verdict().dirty


def test_templates_hold_no_values(bound):
    layer, template = bound
    assert set(template.constants) == {
        i for i, source in enumerate(template.sources) if source and source[0] == "constant"
    }
    weights = {w.untyped_storage()._cdata for w in layer.weights}
    assert {t.untyped_storage()._cdata for t in template.constants.values()} == weights
    assert template.held_bytes == 2 * 3 * 6 * 4
    assert template.transient_bytes == layer.tape.transient_bytes


def test_a_missing_gradient_is_told(bound):
    layer, template = bound
    layer.accumulate = lambda weight, main: None
    layer.bind(template, *values(2))
    (mismatch,) = layer.engine.found
    assert mismatch.wrong == "software"
    assert "did not appear" in mismatch.note


# --- guards -------------------------------------------------------------------------------------

OUTSIDE = torch.linspace(1, 2, 6)
STATE = torch.get_rng_state()


def unnamed(x, up, down):
    return Layer.mlp(x, up, down) * OUTSIDE


def random(x, up, down):
    return torch.nn.functional.dropout(Layer.mlp(x, up, down), 0.1, True)


def scalar(x, up, down):
    return Layer.mlp(x, up, down) * x.detach().abs().max().item()


def scalar_of_its_input(x, up, down):
    return Layer.mlp(x, up, down) * x.detach()[0, 0].item()


def indices(x, up, down):
    return Layer.mlp(x, up, down) + up.detach()[0, x.detach().argmax(1)][:, None]


def writes_elsewhere(x, up, down):
    COUNTER.add_(1)
    return Layer.mlp(x, up, down)


def writes_what_it_computed_elsewhere(x, up, down):
    y = Layer.mlp(x, up, down)
    COUNTER.add_(y.detach()[0, 0])
    return y


def writes_its_input(x, up, down):
    x.detach().mul_(1.0)
    return Layer.mlp(x, up, down)


def mask_from_elsewhere(x, up, down):
    return Layer.mlp(x, up, down).masked_fill(MASK, 0.0)


def cut(x, up, down):
    ENGINE[0].cut_tape()  # as a collective or a compiled graph does
    return Layer.mlp(x, up, down)


def cut_at_the_end(x, up, down):
    y = Layer.mlp(x, up, down)
    ENGINE[0].cut_tape()
    return y


def kept(x, up, down):
    KEPT[:] = [Layer.mlp(x, up, down)]
    return KEPT[0] * 2


COUNTER = torch.zeros(())
MASK = torch.tensor([True, False] * 3)
ENGINE: list = []
KEPT: list = []
REFUSED = [
    unnamed,
    random,
    scalar,
    scalar_of_its_input,
    indices,
    writes_elsewhere,
    writes_what_it_computed_elsewhere,
    writes_its_input,
    mask_from_elsewhere,
    cut,
    cut_at_the_end,
    kept,
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_no_template_for(body):
    layer = Layer(Watched(repairs=False), body)
    ENGINE[:] = [layer.engine]
    _, template = layer.record(*values(1))
    assert template is None
    assert not layer.engine.verdict().dirty
    KEPT.clear()


def compares_generators(x, up, down):
    """As Megatron does around dropout of probability 0."""
    assert (STATE == STATE).all()
    return Layer.mlp(x, up, down)


def scratch(x, up, down):
    return torch.baddbmm(SCRATCH, x[None], up[None], beta=0.0)[0] @ down


SCRATCH = torch.full((1, 3, 12), float("nan"))


@pytest.mark.parametrize("body", [compares_generators, scratch])
def test_a_template_in_spite_of(body):
    layer = Layer(Watched(repairs=False), body)
    _, template = layer.record(*values(1))
    assert template is not None
    assert not layer.engine.verdict().dirty
    layer.bind(template, *values(2))
    with layer.engine.active():
        if body is scratch:
            SCRATCH.copy_(torch.randn(1, 3, 12))
    assert layer.engine.deferred.held_bytes <= template.held_bytes
    assert not layer.engine.verdict().dirty


def test_it_fits_one_geometry_only(bound):
    _, template = bound
    x, gradient = values(2)
    assert template.fits([x], [gradient])
    for other in (x[:2], x.double(), x.t().contiguous().t(), torch.cat([x, x])[3:]):
        assert not template.fits([other], [gradient])
        assert not template.fits([x], [other])
    assert not template.fits([x, x], [gradient])
    assert geometry([x, x.clone()]) != geometry([x, x])  # what shares memory


def test_sampled_runs_are_compared(bound):
    layer, template = bound
    due = [template.due() for _ in range(2 * SAMPLE)]
    assert [i for i, now in enumerate(due, 1) if now] == [SAMPLE, 2 * SAMPLE]
    layer.record(*values(2))
    assert same_operators(template, layer.tape)
    layer.body = lambda x, up, down: Layer.mlp(x, up, down) * 1.5
    layer.record(*values(2))
    assert not same_operators(template, layer.tape)
    layer.engine.verdict()


def test_other_operators_than_the_template_has_are_found(bound):
    """Between two samples: what comes of them differs."""
    layer, template = bound
    layer.body = lambda x, up, down: Layer.mlp(x, up, down) * 1.5
    layer.bind(template, *values(2))
    assert layer.engine.verdict().dirty
