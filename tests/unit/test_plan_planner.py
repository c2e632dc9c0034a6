"""The planner: the method's example, the properties of every plan, and its speed."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import MB, layer, op, pipeline, verify

from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import (
    Costs,
    External,
    InnerWindow,
    Memory,
    Operator,
    Plan,
    Profile,
    Run,
    Template,
    Window,
    plan,
)

MODES = ("naive", "piggyback", "coarse", "full")


def by_name(of: Plan) -> dict[str, tuple[str, int | None]]:
    """Operator to method and ordinal of the window."""
    return {
        name: (str(one.method), one.window.ordinal if one.window else None)
        for row in of.rows
        for name, one in zip(of.operators[of.patterns[row.pattern].template], of.assignments(row))
    }


# --- the worked example -------------------------------------------------------------------


def worked_example() -> Profile:
    seconds = {"A": 4, "B": 3, "C": 1, "D": 5, "E": 2, "F": 6}

    def region(names: str) -> Template:
        return Template(phase="backward", operators=[op(n, seconds[n], held=1) for n in names])

    def window(seconds: float) -> Window:
        return Window(kind="intra", what="tensor", seconds=seconds)

    return Profile(
        templates=(region("AB"), region("CDEF")),
        steps=(
            Run(template=0, microbatch=1, layer=2),
            window(3),
            Run(template=1, microbatch=1, layer=1),
            window(9),
        ),
    )


def test_worked_example():
    made = plan(worked_example(), budget=3, mode="full", window_use=1.0)
    assert by_name(made) == {
        "A": ("D-DMR_intra", 1),
        "B": ("D-DMR_intra", 0),
        "C": ("naive", None),
        "D": ("D-DMR_intra", 1),
        "E": ("naive", None),
        "F": ("naive", None),
    }
    why = {
        name: str(one.why)
        for row in made.rows
        for name, one in zip(
            made.operators[made.patterns[row.pattern].template], made.assignments(row)
        )
    }
    assert "shortest" in why["C"] and why["C"] == why["E"]
    assert why["F"] == "no later window had room"
    assert made.totals.critical_seconds == 1 + 2 + 6
    assert made.totals.peak_held == 3
    verify(worked_example(), made, 3)


def test_single_operators_of_one_region_wait_for_the_windows_inside_it():
    operators = [op(name, 1.0, held=1) for name in "abcd"]
    inner = InnerWindow(kind="intra", what="tensor", seconds=2, after=3)
    template = Template(phase="backward", operators=operators, windows=[inner])
    profile = Profile(templates=[template], steps=[Run(template=0, microbatch=1, layer=1)])
    made = plan(profile, budget=9, window_use=1.0)
    verify(profile, made, 9)
    methods = by_name(made)
    assert methods["d"] == ("naive", None)
    assert sorted(methods[name][1] is None for name in "abc") == [False, False, True]


# --- phase 1 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "replay", "method"),
    [(True, 2.5, "naive"), (True, 1.5, "P-DMR"), (False, 2.5, "P-DMR"), (True, None, "P-DMR")],
)
def test_replaying_too_much_communication(early, replay, method):
    last = op("mm", 1.0, recomputed=True, replay=replay)
    profile = Profile(
        recompute_stops_early=early,
        templates=[Template(phase="forward", operators=[op("ln", 1.0, recomputed=True), last])],
        steps=[Run(template=0, microbatch=1, layer=1)],
    )
    made = plan(profile, mode="piggyback")
    assert by_name(made) == {"ln": ("P-DMR", None), "mm": (method, None)}
    cost = 1.0 if method == "naive" else 1.0 + replay if early and replay else 0.0
    assert made.totals.critical_seconds == cost


# --- phase 2 ------------------------------------------------------------------------------


def test_a_segment_has_a_small_boundary_where_memory_is_short():
    profile = pipeline(window=1.0)
    made = plan(profile, budget=24 * MB, mode="coarse")
    choice = made.choice(1, 2, "recompute")
    assert choice.method == made.choice(1, 2, "backward").method == "segment"
    (segment, window), *_ = choice.segments
    singly = sum(o.held for t in profile.templates[1:3] for o in t.operators)
    assert segment.boundary <= 24 * MB < singly
    assert window.what == "pipeline"
    assert {part.phase for part in segment.parts} == {"recompute", "backward"}
    verify(profile, made, 24 * MB)


def test_with_memory_to_spare_the_recompute_is_not_replayed_again():
    made = plan(pipeline(window=1.0), budget=10_000 * MB, mode="coarse")
    (segment, _), *_ = made.choice(1, 2, "backward").segments
    assert {part.phase for part in segment.parts} == {"backward"}
    assert segment.gain == segment.saved


def test_a_fully_replayed_recompute_needs_the_outputs_fingerprint_only():
    profile = pipeline(window=1.0, costs=Costs(fingerprint=1e-11))
    piggyback = plan(profile, mode="piggyback").totals.critical
    naive = plan(profile, mode="naive").totals.critical_seconds
    seen = set()
    for budget in (1, 14, 18, 22, 26, 30):
        made = plan(profile, budget=budget * MB)
        sparse = False
        for row in made.rows:
            choice = made.choice(*row[:3])
            if row.phase == "recompute":
                parts = [part[:3] for segment, _ in choice.segments for part in segment.parts]
                whole = ("recompute", 0, 10) in parts
                assert choice.fingerprints == ("output" if whole else "all")
                forward = made.choice(row.microbatch, row.layer, "forward")
                assert forward.fingerprints == choice.fingerprints
                sparse |= whole
        assert (made.totals.critical["fingerprint"] < piggyback["fingerprint"]) == sparse
        assert sum(made.totals.gains.values()) == pytest.approx(
            naive - made.totals.critical_seconds
        )
        seen.add(sparse)
    assert seen == {True, False}


def test_the_last_backward_of_the_first_stage_has_no_window_after_it():
    profile = pipeline(microbatches=4, window=1.0)
    made = plan(profile, budget=10_000 * MB)
    methods = [made.choice(m, 2, "backward").method for m in (1, 2, 3, 4)]
    assert methods == ["segment", "segment", "segment", "naive"]
    assert 0 < made.totals.floor <= made.totals.overhead
    last = plan(pipeline(microbatches=4, window=1.0, stage=1), budget=10_000 * MB)
    assert last.choice(4, 2, "backward").method == "segment"


def test_short_windows_and_much_memory_prefer_single_deferral():
    profile = pipeline(layers=8, microbatches=8, window=5e-3)
    much = plan(profile, budget=10_000 * MB)
    little = plan(profile, budget=20 * MB)
    verify(profile, much, 10_000 * MB)
    verify(profile, little, 20 * MB)
    assert much.totals.gains["phase3"] > 0
    assert little.totals.gains["phase2"] > 0
    assert much.totals.overhead < little.totals.overhead
    coarse = plan(profile, budget=20 * MB, mode="coarse")
    assert little.totals.critical_seconds <= coarse.totals.critical_seconds * (1 + 1e-9)


def test_collectives_cut_segments():
    profile = pipeline(window=1.0, collectives=True)
    made = plan(profile, budget=10_000 * MB, mode="coarse")
    verify(profile, made, 10_000 * MB)
    assert len(made.choice(1, 2, "backward").segments) > 1


def test_writes_stay_naive_or_inside():
    operators = [
        op("mm", 1.0, (~0,)),
        op("mul_", 1.0, (0,), mutating=True, overwrites=(0,)),
        op("add_", 1.0, (1,), mutating=True),
    ]
    profile = Profile(
        templates=[Template(phase="backward", operators=operators, externals=[External(bytes=MB)])],
        steps=[
            Run(template=0, microbatch=1, layer=1),
            Window(kind="inter", what="pipeline", seconds=10),
        ],
    )
    made = plan(profile, budget=10 * MB, mode="coarse")
    assert by_name(made) == {
        "mm": ("D-DMR_inter", 0),
        "mul_": ("D-DMR_inter", 0),
        "add_": ("naive", None),
    }
    assert made.choice(1, 1, "backward").segments[0][0].boundary == MB
    assert dict(made.choice(1, 1, "backward").overrides) == {2: "naive"}


def test_what_is_not_worth_recording_stays_naive():
    profile = worked_example().model_copy(update={"costs": Costs(record=2)})
    made = plan(profile, budget=30, window_use=1.0)
    methods = by_name(made)
    assert methods["C"] == methods["E"] == ("naive", None)
    assert [methods[name][0] for name in "ABD"] == ["D-DMR_intra"] * 3
    (_, row) = made.rows
    assert next(iter(made.assignments(row))).why == "recording it costs as much as checking it"


# --- properties ---------------------------------------------------------------------------

SECONDS = st.integers(0, 8).map(lambda n: n / 8)
BYTES = st.integers(0, 6)


@st.composite
def templates(draw, phase: str, recompute: Template | None = None) -> Template:
    recomputed = phase == "recompute" or (phase == "forward" and draw(st.booleans()))
    externals = [External(bytes=draw(BYTES)) for _ in range(draw(st.integers(1, 2)))]
    if recompute is not None:
        values = range(-len(recompute.externals), len(recompute.operators))
        for value in draw(st.lists(st.sampled_from(values), max_size=4)):
            externals.append(External(bytes=3, phase="recompute", value=value))
    operators = []
    for ordinal in range(draw(st.integers(0, 6))):
        values = st.sampled_from(range(-len(externals), ordinal))
        inputs = tuple(draw(st.lists(values, max_size=3, unique=True)))
        flags = {
            flag: draw(st.integers(0, 7)) == 0
            for flag in ("mutating", "random", "integer", "collective")
        }
        operators.append(
            Operator(
                name=f"op{ordinal}",
                seconds=draw(SECONDS),
                check=draw(st.none() | SECONDS),
                written=draw(BYTES),
                held=draw(BYTES),
                inputs=inputs,
                overwrites=inputs[:1] if flags["mutating"] and draw(st.booleans()) else (),
                recomputed=recomputed,
                replay=draw(st.none() | SECONDS) if phase == "forward" else None,
                **flags,
            )
        )
    places = sorted(draw(st.lists(st.integers(0, len(operators)), max_size=2)))
    windows = [
        InnerWindow(
            kind=draw(st.sampled_from(["inter", "intra"])),
            what="tensor",
            seconds=draw(SECONDS),
            after=place,
            dynamic=draw(st.booleans()),
        )
        for place in places
    ]
    return Template(phase=phase, operators=operators, externals=externals, windows=windows)


@st.composite
def profiles(draw) -> Profile:
    recompute = draw(templates("recompute"))
    some = (
        draw(templates("forward")),
        recompute,
        draw(templates("backward", recompute)),
        draw(templates("backward")),
        draw(templates("optimizer")),
    )
    steps = []
    for microbatch in range(1, draw(st.integers(1, 4)) + 1):
        for _ in range(draw(st.integers(0, 5))):
            what = draw(st.integers(0, 6))
            place = {"microbatch": microbatch, "layer": len(steps)}
            if what < 3:
                drains = draw(st.integers(0, 9)) == 0
                steps.append(
                    Window(
                        kind=draw(st.sampled_from(["inter", "inter", "intra"])),
                        what="pipeline",
                        seconds=4 * draw(SECONDS),
                    )
                )
                steps.append(Run(template=0, drains=drains, **place))
            elif what < 5:
                steps += [Run(template=1, **place), Run(template=2, **place)]
            else:
                steps.append(Run(template=3, **place))
    steps.append(Run(template=4))
    capacity = draw(st.sampled_from([0, 20, 100]))
    in_use = [draw(st.integers(0, capacity or 20)) for _ in steps] if draw(st.booleans()) else []
    return Profile(
        recompute_stops_early=draw(st.booleans()),
        costs=Costs(record=draw(st.sampled_from([0.0, 0.01, 0.2]))),
        templates=some,
        steps=steps,
        memory=Memory(in_use=in_use, peak=max(in_use, default=5), capacity=capacity),
    )


@settings(max_examples=80, deadline=None)
@given(profiles(), st.integers(0, 60), st.sampled_from([0.5, 0.9, 1.0]))
def test_every_plan(profile, budget, window_use):
    made = {mode: plan(profile, budget, mode, window_use) for mode in MODES}
    for one in made.values():
        verify(profile, one, budget)
    piggyback = made["piggyback"].totals.critical_seconds
    slack = 1 + 1e-9
    assert made["coarse"].totals.critical_seconds <= piggyback * slack
    assert made["full"].totals.critical_seconds <= made["coarse"].totals.critical_seconds * slack
    # No phase undoes another: what is not deferred is as in the phases before.
    for mode in ("coarse", "full"):
        for row, before in zip(made[mode].rows, made["piggyback"].rows):
            for new, old in zip(made[mode].assignments(row), made["piggyback"].assignments(before)):
                assert new.method is old.method or (old.method == "naive" and new.method.deferred)
    if budget == 0:
        for row, before in zip(made["full"].rows, made["piggyback"].rows):
            assert [a.method for a in made["full"].assignments(row)] == [
                a.method for a in made["piggyback"].assignments(before)
            ]


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(0, 60), st.sampled_from(["coarse", "full"]))
def test_the_plan_of_half_the_budget_is_never_cheaper(profile, budget, mode):
    whole, half = (plan(profile, b, mode).totals for b in (budget, budget // 2))
    assert whole.critical_seconds <= half.critical_seconds * (1 + 1e-9)
    assert whole.planned_budget <= whole.budget == budget


def test_a_smaller_budgets_plan_is_kept_where_it_is_cheaper():
    # With room for two, the shorter operator fills the first window in the longer's place.
    def region(name, seconds, held):
        return Template(phase="backward", operators=[op(name, seconds, held=held)])

    profile = Profile(
        templates=[region("long", 6, 2), region("short", 4, 1), region("last", 5, 2)],
        steps=[
            Run(template=0, microbatch=1, layer=3),
            Run(template=1, microbatch=1, layer=2),
            Window(kind="intra", what="tensor", seconds=7),
            Run(template=2, microbatch=1, layer=1),
            Window(kind="intra", what="tensor", seconds=4),
        ],
    )
    totals = [plan(profile, budget, window_use=1.0).totals for budget in range(6)]
    costs = [one.critical_seconds for one in totals]
    assert costs[0] == plan(profile, mode="piggyback").totals.critical_seconds
    assert all(a >= b for a, b in zip(costs, costs[1:]))


# --- speed and refusals -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"window": 0.3}, {"window": 0.05, "collectives": True}])
def test_eighty_layers_three_stages_sixty_four_microbatches(options):
    profiles = [
        pipeline(
            layers=(27, 27, 26)[stage],
            microbatches=64,
            stage=stage,
            stages=3,
            depth=40,
            unit=2e-3,
            **options,
        )
        for stage in range(3)
    ]
    times = []
    for _ in range(2):
        start = time.process_time()
        plans = [plan(profile, budget=2000 * MB) for profile in profiles]
        times.append(time.process_time() - start)
    assert min(times) < 2
    for profile, made in zip(profiles, plans):
        assert (
            made.totals.critical_seconds < plan(profile, mode="piggyback").totals.critical_seconds
        )


def test_refusals():
    profile = worked_example()
    for options, word in (
        ({"mode": "best"}, "mode"),
        ({"window_use": 0.0}, "window use"),
        ({"window_use": 1.5}, "window use"),
        ({"budget": -1}, "budget"),
        ({"budget": None}, "budget"),
    ):
        with pytest.raises(UsageError, match=word):
            plan(profile, **{"budget": 3, **options})
    forward, recompute, backward = layer()
    broken = backward.model_copy(
        update={"externals": (*backward.externals, External(bytes=1, phase="recompute", value=99))}
    )
    with pytest.raises(UsageError, match="value 99"):
        plan(
            Profile(
                templates=[forward, recompute, broken],
                steps=[Run(template=t, microbatch=1, layer=1) for t in (1, 2)],
            ),
            budget=1,
        )


def test_default_budget_is_what_the_device_has_left():
    made = plan(pipeline(window=1.0, capacity=130 * MB))
    assert made.totals.budget == 30 * MB
    verify(pipeline(window=1.0, capacity=130 * MB), made, 30 * MB)
