"""Profiles and plans as files, what the run time asks of a plan, and what people see of them."""

import json

import pytest
from plan_profiles import MB, pipeline

from sparetrain_megatron import cli
from sparetrain_megatron.errors import UsageError
from sparetrain_megatron.plan import (
    Identity,
    InnerWindow,
    Operator,
    Plan,
    Profile,
    Template,
    load_plans,
    plan,
    save_plans,
)


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    return [pipeline(stage=s, window=4e-3, capacity=150 * MB, collectives=True) for s in (0, 1)]


def test_profiles_round_trip(profiles, tmp_path):
    path = profiles[0].save(tmp_path / "new" / "profile.rank0.json")
    assert Profile.load(path) == profiles[0]
    assert json.loads(path.read_text())["schema"] == 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_plans_round_trip(profiles, tmp_path):
    plans = {profile.stage: plan(profile) for profile in profiles}
    path = save_plans(tmp_path / "plan.json", plans)
    loaded = load_plans(path)
    assert loaded == plans
    for row in plans[0].rows:
        assert loaded[0].choice(*row[:3]) == plans[0].choice(*row[:3])


def test_unreadable_files(profiles, tmp_path):
    missing, path = tmp_path / "missing.json", tmp_path / "profile.json"
    with pytest.raises(UsageError, match=r"missing\.json: No such file"):
        Profile.load(missing)
    content = json.loads(profiles[0].save(path).read_text())
    for change, message in (
        ({"schema": 2}, "schema 2"),
        ({"kind": "plan"}, "not a profile but a plan"),
        ({"steps": [{"template": 77}]}, "template 77"),
        ({"seconds": "long"}, "seconds"),
        ({"surprise": 1}, "surprise"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(UsageError, match=message):
            Profile.load(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="not readable as JSON"):
        Profile.load(path)
    with pytest.raises(UsageError, match="not readable as JSON"):
        load_plans(path)


def test_templates_refuse_nonsense():
    with pytest.raises(ValueError, match="neither an earlier"):
        Template(phase="forward", operators=[Operator(name="mm", seconds=1, inputs=(0,))])
    with pytest.raises(ValueError, match="windows are not in order"):
        Template(
            phase="forward",
            windows=[InnerWindow(kind="intra", what="tensor", seconds=1, after=1)],
        )


def test_a_plan_for_another_run_is_refused(profiles):
    made = plan(profiles[0])
    made.refuse_unless_for(profiles[0].identity)
    other = Identity(
        megatron="0.18.0",
        model={"layers": 8, "hidden": 128},
        layout={"pipeline": 4, "microbatches": 4, "tensor": 2},
        flags={"recompute": "full"},
    )
    with pytest.raises(UsageError) as caught:
        made.refuse_unless_for(other)
    text = str(caught.value)
    for difference in (
        "Megatron version: 0.19.2, not 0.18.0",
        "model hidden: 64, not 128",
        "layout pipeline: 2, not 4",
        "layout tensor: not given, not 2",
    ):
        assert difference in text
    assert "layers" not in text and "recompute" not in text


def test_choices_say_the_same_as_the_rows(profiles):
    made: Plan = plan(profiles[1])
    kinds = set()
    for row in made.rows:
        choice = made.choice(*row[:3])
        assert choice is made.choice(*row[:3]) and choice.known
        kinds.add(choice.method)
        template = made.operators[made.patterns[row.pattern].template]
        assert choice.operators == template
        replayed = {
            ordinal
            for segment, _ in choice.segments
            for part in segment.parts
            if part.phase == row.phase
            for ordinal in range(part.start, part.stop)
        }
        for ordinal, one in enumerate(made.assignments(row)):
            method = choice.overrides.get(ordinal)
            if ordinal in choice.windows:
                assert one.method.deferred and one.window == choice.windows[ordinal]
            elif method is None:
                assert choice.method != "single"
                if choice.method == "segment":
                    assert ordinal in replayed
                else:
                    assert one.method == {"piggyback": "P-DMR", "naive": "naive"}[choice.method]
            else:
                assert method is one.method
    assert "segment" in kinds
    unknown = made.choice(99, 1, "backward")
    assert unknown.method == "naive" and not unknown.known and unknown.window is None


def test_commands(profiles, tmp_path, capsys):
    paths = [str(p.save(tmp_path / f"profile.rank{p.rank}.json")) for p in profiles]
    out = str(tmp_path / "plan.json")
    assert cli.main(["plan", *paths, "--memory-budget", "20MiB", "--out", out]) == 0
    text = capsys.readouterr().out
    for words in ("stage 0: plan", "stage 1: checks", "predicted overhead", "busiest windows"):
        assert words in text
    assert load_plans(out)[1].totals.budget == 20 * MB
    assert cli.main(["show", out]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["show", out, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in shown["stages"]] == [0, 1]
    assert shown["stages"][0]["peak_held"] <= 20 * MB
    assert cli.main(["show", paths[0]]) == 0
    assert "regions" in capsys.readouterr().out
    assert cli.main(["show", "--json", paths[0]]) == 0
    assert json.loads(capsys.readouterr().out)["operators"] == profiles[0].operator_count()
    assert cli.main(["plan", paths[0], "--memory-budget", "10%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["budget"] == 15 * MB
    assert cli.main(["plan", paths[0], "--memory-budget", "0", "--mode", "full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["peak_held"] == 0


def test_commands_refuse(profiles, tmp_path, capsys):
    path = str(profiles[0].save(tmp_path / "profile.rank0.json"))
    other = pipeline(stage=1, layers=5).save(tmp_path / "profile.rank1.json")
    (tmp_path / "list.json").write_text("[]")
    for arguments, word in (
        (["plan", path, "--memory-budget", "much"], "--memory-budget"),
        (["plan", path, str(other)], "model layers: 10, not 8"),
        (["plan", path, "--window-use", "2"], "window use"),
        (["show", str(tmp_path / "list.json")], "not a plan"),
        (["show", str(tmp_path / "none.json")], "No such file"),
    ):
        assert cli.main(arguments) == 2
        assert word in capsys.readouterr().err
