"""What a recorder makes of running steps."""

import time

import pytest
import torch

from sparetrain_megatron.plan import Identity, Profile, Run, Window, plan
from sparetrain_megatron.profiler import Recorder
from tests.unit.protected import Watched

IDENTITY = Identity(megatron="0.0", model={"layers": 1})


class Step:
    """A stage's step: two microbatches of a layer, with windows before, inside and after.

    Args:
        engine: Its observer is the recorder.
    """

    def __init__(self, engine):
        self.engine = engine
        self.weight = torch.eye(4) * 2
        self.buffer = torch.zeros(4, 4)
        self.extra = False
        engine.mark_accumulators([self.buffer])
        engine.deferred.mark_constants([self.weight])

    def window(self, kind, name, seconds=0.002):
        self.engine.window_opens(kind, name)
        time.sleep(seconds)
        self.engine.window_closes()

    def forward(self, x):
        hidden = x @ self.weight
        self.window("intra", "all_reduce")
        return hidden, torch.tanh(hidden)

    def __call__(self):
        engine = self.engine
        for microbatch in (1, 2):
            self.window("inter", "recv_prev", 0.004)
            x = torch.ones(3, 4)
            with engine.at(microbatch=microbatch, layer=1, phase="forward"):
                self.forward(x)
            with engine.at(microbatch=microbatch, layer=1, phase="recompute"):
                hidden, output = self.forward(x)
            with engine.at(microbatch=microbatch, layer=1, phase="backward"):
                gradient = output * 3
                gradient.mul_(hidden)
                if self.extra:
                    gradient.neg()
                self.buffer.add_(x.t() @ gradient)
            self.window("inter", "send_next+recv_prev", 0.001)
        with engine.at(microbatch=None, layer=None, phase="optimizer"):
            self.buffer.mul_(0.5)


@pytest.fixture
def engine():
    engine = Watched()
    position = engine.position
    engine.observer = Recorder(
        position, engine.deferred.constants, lambda: position.phase in ("forward", "recompute")
    )
    return engine


def iterate(engine, step, seconds=0.02):
    engine.protect(step)
    engine.observer.iteration(seconds)


@pytest.fixture
def profile(engine):
    step = Step(engine)
    for _ in range(3):
        iterate(engine, step)
    assert engine.observer.iterations == 3
    return engine.observer.profile(IDENTITY, rank=1, stage=1)


def template(profile, phase):
    (found,) = [t for t in profile.templates if t.phase == phase and t.operators[0].name != "ones"]
    return found


def test_valid_and_readable(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert (profile.rank, profile.stage, profile.iterations) == (1, 1, 3)
    assert profile.identity == IDENTITY
    for mode in ("naive", "piggyback", "coarse", "full"):
        assert plan(profile, 1 << 20, mode).stage == 1


def test_the_order_of_the_step(profile):
    steps = [
        profile.templates[s.template].phase if isinstance(s, Run) else s.what
        for s in profile.steps
        if not isinstance(s, Run)
        or s.layer is not None
        or s.microbatch is not None
        or profile.templates[s.template].phase == "optimizer"
    ]
    microbatch = ["pipeline", "forward", "recompute", "backward", "pipeline"]
    assert steps == [*microbatch, *microbatch, "optimizer"]
    places = [(s.microbatch, s.layer) for s in profile.steps if isinstance(s, Run) and s.layer]
    assert places == [(1, 1)] * 3 + [(2, 1)] * 3


def test_templates_are_shared_by_microbatches(profile):
    runs = [s for s in profile.steps if isinstance(s, Run) and s.layer == 1]
    assert [r.template for r in runs[:3]] == [r.template for r in runs[3:]]


def test_data_flow(profile):
    recompute, backward = template(profile, "recompute"), template(profile, "backward")
    mm, tanh = recompute.operators
    assert (mm.name, tanh.name) == ("mm", "tanh")
    assert (mm.inputs, tanh.inputs) == ((~0,), (0,))  # the weight is no input: it is constant
    assert (mm.held, tanh.held) == (48, 48)
    assert (mm.written, mm.recomputed) == (48, True)
    assert [e.bytes for e in recompute.externals] == [48]
    mul, mul_, product, add_ = backward.operators
    assert not any(o.recomputed for o in backward.operators)
    assert [o.name for o in backward.operators] == ["mul", "mul_", "mm", "add_"]
    # It reads the recompute's results: tanh's and mm's.
    links = [(e.phase, e.value) for e in backward.externals]
    assert mul.inputs == (~0,)
    assert links[0] == ("recompute", 1)
    assert (mul_.inputs, mul_.overwrites) == ((0, ~1), (0,))
    assert links[1] == ("recompute", 0)
    assert product.inputs == (~2, 1)  # the value as `mul_` left it
    assert links[2] == (None, None)  # the layer's input, from outside
    assert add_.inputs[-1] == 2  # the gradient that goes into the buffer
    assert (add_.overwrites, add_.mutating) == ((), True)  # memory from outside


def test_windows_are_where_the_rank_waited(profile):
    forward = template(profile, "forward")
    (inner,) = forward.windows
    assert (inner.after, inner.kind, inner.what) == (1, "intra", "tensor")
    assert 0.002 <= inner.seconds < 0.05
    assert template(profile, "backward").windows == ()
    windows = [s for s in profile.steps if isinstance(s, Window)]
    assert [(w.kind, w.what) for w in windows] == [("inter", "pipeline")] * 4
    assert windows[0].seconds >= 0.004 > windows[1].seconds * 0.5


def test_times_are_those_of_one_execution(engine, monkeypatch):
    import sparetrain_megatron.profiler.recorder as module

    class Slow:
        """A clock on which every look takes a second."""

        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    monkeypatch.setattr(module, "_clock", Slow())
    iterate(engine, Step(engine))
    profile = engine.observer.profile(IDENTITY, 0, 0)
    for found in profile.templates:
        # Two looks in a row: the checker, which runs beside it, is not in it.
        assert {o.seconds for o in found.operators} == {1.0}


def test_an_iteration_of_another_shape_is_left_out(engine):
    step = Step(engine)
    iterate(engine, step, 0.02)
    step.extra = True
    iterate(engine, step, 9.0)
    step.extra = False
    for _ in range(2):
        iterate(engine, step, 0.02)
    profile = engine.observer.profile(IDENTITY, 0, 0)
    assert profile.iterations == 3
    assert profile.spread == 0
    assert len(template(profile, "backward").operators) == 4


def test_a_discarded_attempt_leaves_nothing(engine):
    step = Step(engine)
    engine.protect(step)
    engine.observer.discard()
    assert engine.observer.iterations == 0
    with pytest.raises(ValueError, match="no iteration"):
        engine.observer.profile(IDENTITY, 0, 0)
    iterate(engine, step)
    assert engine.observer.profile(IDENTITY, 0, 0).iterations == 1


def test_costs_of_a_bound_block_only_where_blocks_are_bound(engine):
    iterate(engine, Step(engine))
    assert engine.observer.profile(IDENTITY, 0, 0).costs.bound is not None
    assert engine.observer.profile(IDENTITY, 0, 0, binds=False).costs.bound is None


def test_watching_changes_nothing(engine):
    watched, plain = Step(engine), Step(Watched())
    iterate(engine, watched)
    plain()
    assert torch.equal(watched.buffer, plain.buffer)
    assert engine.found == []
    assert engine.counters.checks["naive"]["mutating"] > 0
