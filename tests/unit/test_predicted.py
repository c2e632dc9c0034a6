"""The recipes' READMEs say what the simulator says."""

import sys

import pytest

from tests.harness import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import predict

sys.path.pop(0)


@pytest.mark.parametrize("recipe", predict.RECIPES)
def test_a_row_of_each_readme(recipe):
    text = (ROOT / "examples" / recipe / "README.md").read_text()
    assert text.index(predict.BEGIN) < text.index(predict.END)
    memory, flags = list(predict.RECIPES[recipe].items())[-1]
    assert predict.row(memory, "an adapter a GPU", predict.simulated(flags)) in text
    assert text.count(" GB | ") >= 2 * len(predict.RECIPES[recipe])
    assert f"sparetrain simulate {flags} {predict.COMMON}\n" in text
    assert (ROOT / "examples" / recipe / predict.PICTURE).stat().st_size > 1000


@pytest.mark.parametrize("recipe", predict.RECIPES)
def test_layouts_are_those_of_the_recipe(recipe):
    script = (ROOT / "examples" / recipe / "train.sh").read_text()
    for memory, flags in predict.RECIPES[recipe].items():
        words = flags.split()
        part = next(p for p in script.split(";;") if f"{memory})" in p or f"{memory} |" in p)
        for ours, theirs in (
            ("--tp", "--tensor-model-parallel-size"),
            ("--pp", "--pipeline-model-parallel-size"),
            ("--ep", "--expert-model-parallel-size"),
            ("--micro-batch-size", "--micro-batch-size"),
        ):
            if ours in words:
                assert f"{theirs} {words[words.index(ours) + 1]}" in part, (memory, ours)


def test_only_what_stands_between_the_marks_is_replaced():
    text = f"before\n{predict.BEGIN}\nold\n{predict.END}\nafter\n"
    assert predict.rewrite(text, "\nnew\n") == text.replace("old", "new")
    with pytest.raises(ValueError):
        predict.rewrite("no marks", "new")
