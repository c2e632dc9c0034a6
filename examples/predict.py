"""Writes what the simulator predicts of the recipes into their READMEs, with a picture each.

    python examples/predict.py [RECIPE …]

Every row is what `sparetrain simulate` says with the flags that stand under it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from sparetrain_megatron.simulator import commands  # noqa: E402
from sparetrain_megatron.simulator.machine import GIB  # noqa: E402

RECIPES = {
    "llama3_70b": {
        80: "--preset llama3-70b --memory-gb 80 --tp 8 --pp 3 --dp 1",
        94: "--preset llama3-70b --memory-gb 94 --tp 8 --pp 2 --dp 2",
        141: "--preset llama3-70b --memory-gb 141 --tp 8 --pp 2 --dp 2 --micro-batch-size 2",
    },
    "mistral_large": {
        80: "--preset mistral-large --memory-gb 80 --tp 8 --pp 4 --dp 1",
        94: "--preset mistral-large --memory-gb 94 --tp 8 --pp 4 --dp 1",
        141: "--preset mistral-large --memory-gb 141 --tp 8 --pp 2 --dp 2",
    },
    "llama4_scout": {
        94: "--preset llama4-scout --memory-gb 94 --tp 8 --pp 4 --dp 1 --ep 8",
        141: "--preset llama4-scout --memory-gb 141 --tp 8 --pp 2 --dp 2 --ep 8",
    },
}
"""By folder and memory: flags of `sparetrain simulate`, with `COMMON`."""

COMMON = "--gpu h200 --deterministic --global-batch-size 32"
SLOW = "--node-adapter 6.8"
NETWORKS = {"an adapter a GPU": "", "one slow adapter a node": SLOW}
BEGIN, END = "<!-- predicted: examples/predict.py -->", "<!-- end -->"
PICTURE = "timeline.png"


def simulated(flags: str) -> dict[str, Any]:
    """What `sparetrain simulate --json` says with these flags and the common ones."""
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    _, values = commands.run(parser.parse_args(["simulate", *shlex.split(f"{flags} {COMMON}")]))
    return values


def row(memory: int, network: str, values: dict[str, Any]) -> str:
    """One line of the table."""
    modes = values["modes"]
    full = modes["full"]
    cells = (
        f"{memory} GB",
        network,
        f"{values['step_s']:.2f} s",
        f"{values['idle_share']:.0%}",
        *(f"{modes[mode]['overhead']:.1%}" for mode in ("naive", "piggyback")),
        f"**{full['overhead']:.1%}**",
        " + ".join(f"{share:.0%}" for share in full["share_by_method"].values()),
        f"{full['held_bytes'] / GIB:.0f} GiB",
    )
    return "| " + " | ".join(cells).replace("%", " %") + " |"


def section(recipe: str, picture: Path) -> str:
    """The text between the marks; draws the first layout on the slow network."""
    variants = RECIPES[recipe]
    first = min(variants)
    rows = []
    for memory, flags in variants.items():
        for network, more in NETWORKS.items():
            drawing = f"--picture {shlex.quote(str(picture))}" if more and memory == first else ""
            rows.append(row(memory, network, simulated(f"{flags} {more} {drawing}")))
    table = "\n".join(rows)
    lines = "\n".join(f"sparetrain simulate {flags} {COMMON}" for flags in variants.values())
    return f"""
These are **predictions** of the simulator, not measurements. What protection costs is decided by
how much the layout waits: on a fast network there is little to hide checks in.

| GPU | network | step | idle | naive | piggyback | full | plan | held |
|---|---|---|---|---|---|---|---|---|
{table}

Data-parallel reductions are reckoned as exposed: `--overlap-grad-reduce` hides a part of them
behind the backward, which shortens the step and the windows.

*Plan*: shares of the checks' time: P-DMR + D-DMR between nodes + inside a node + naive. *Held*: the
most that deferred checks keep on a GPU.

```sh
{lines}
```

The rows of the slow network, 6.8 GB/s for all GPUs of a node, add `{SLOW}`.
[docs/simulator.md](../../docs/simulator.md) says what is assumed. A step at {first} GB on that
network, without and with protection:

![Timeline of each stage]({picture.name})
"""


def rewrite(text: str, new: str) -> str:
    """A README with another section.

    Raises:
        ValueError: It has no marks.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + new + text[end:]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    names = arguments.parse_args(argv).recipes or list(RECIPES)
    if unknown := set(names) - RECIPES.keys():
        arguments.error(f"no such recipe: {', '.join(sorted(unknown))}")
    for recipe in names:
        readme = HERE / recipe / "README.md"
        text = section(recipe, HERE / recipe / PICTURE)
        readme.write_text(rewrite(readme.read_text(encoding="utf-8"), text), encoding="utf-8")
        print(f"wrote {readme} and {PICTURE}")


if __name__ == "__main__":
    main()
