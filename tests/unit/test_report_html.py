"""`sparetrain report --html`: one complete file that loads nothing; and as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparetrain_megatron import cli
from sparetrain_megatron.config import SparetrainConfig
from sparetrain_megatron.plan.plan import save_plans
from sparetrain_megatron.plan.planner import plan
from sparetrain_megatron.plan.profile import Operator, Profile, Run, Template, Window
from sparetrain_megatron.report import charts
from sparetrain_megatron.report.events import EventLog
from sparetrain_megatron.report.html import page, progress, spans, write_html
from sparetrain_megatron.report.overview import Overview
from sparetrain_megatron.report.summary import Statistics, write_summary

SECTIONS = ["summary", "overhead", "checks", "timeline", "mismatches", "rollbacks", "warnings"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def profile(stage: int) -> Profile:
    operators = tuple(Operator(name=name, seconds=0.002) for name in ("mm", "add"))
    templates = (
        Template(phase="forward", operators=operators),
        Template(phase="backward", operators=operators),
    )
    window = Window(kind="inter", what="pipeline", seconds=0.01)
    steps = (
        Run(template=0, microbatch=1, layer=1),
        Run(template=0, microbatch=1, layer=2),
        window,
        Run(template=1, microbatch=1, layer=2),
        Run(template=1, microbatch=1, layer=1),
    )
    return Profile(rank=stage, stage=stage, templates=templates, steps=steps)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with everything in it."""
    directory = tmp_path / "run"
    for rank in (0, 1):
        log = EventLog(directory, rank)
        for iteration in range(1, 7):
            log.emit(
                "iteration",
                iteration=iteration,
                operators_checked=100 * iteration,
                mismatches=0,
                rollbacks=0,
                seconds_in_checks=0.1 * iteration * (rank + 1),
                seconds_in_windows=0.0,
                seconds_total=1.0 * iteration,
            )
        profile(rank).save(directory / f"profile.rank{rank}.json")
    for number, operator in enumerate(("mm", "mm", "<add>")):
        log.emit(
            "mismatch",
            iteration=4,
            attempt=1,
            operator=operator,
            phase="backward",
            method="naive",
            host=f"node{number}",
            device="cuda:1 GPU-12",
        )
    log.emit("rollback", iteration=4, attempt=1)
    log.emit("warning", message="look & see")
    save_plans(directory / "plan.json", {s: plan(profile(s), 1 << 30, "full") for s in (0, 1)})
    statistics = Statistics(iterations=6, mismatches=3, rollbacks=1, unprotected={"a::b": 4})
    statistics.count_check("naive", "pure", 700)
    statistics.count_check("piggyback", "pure", 300)
    write_summary(directory, statistics, SparetrainConfig(enabled=True), 2)
    return directory


class Page(HTMLParser):
    """Checks that tags are closed, and collects what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.loaded += [values[name] for name in ("src", "href", "data") if name in values]
        if tag in ("script", "link", "iframe", "img", "object"):
            self.loaded.append(tag)
        if tag == "section":
            self.sections.append(values["id"])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_section_and_nothing_to_load(run: Path, capsys) -> None:
    target = run.parent / "new" / "report.html"
    assert cli.main(["report", str(run), "--html", str(target)]) == 0
    assert f"wrote {target}" in capsys.readouterr().err
    text = target.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.sections == SECTIONS
    assert parsed.loaded == []
    assert not re.search(r"https?:|url\(|@import", text)
    assert text.count("<svg") == 4
    assert "nan" not in text.lower()


def test_what_the_sections_say(run: Path) -> None:
    text = page(Overview.read(run))
    parts = {
        name: text.split(f'<section id="{name}">')[1].split("</section>")[0] for name in SECTIONS
    }
    assert "3 mismatches" in text
    assert "15.00 %" in parts["overhead"]
    assert "iteration 4" in parts["overhead"]
    assert "naive, pure: 700" in parts["checks"]
    assert "a::b" in parts["checks"]
    assert "stage 1" in parts["timeline"]
    assert "forward, microbatch 1" in parts["timeline"]
    assert "checks in a window (pipeline)" in parts["timeline"]
    assert "rank 1: node0 cuda:1 GPU-12" in parts["mismatches"]
    assert "&lt;add&gt;" in parts["mismatches"]
    assert "<add>" not in text
    assert "<td>4</td><td>1</td><td>1</td>" in parts["rollbacks"]
    assert "look &amp; see" in parts["warnings"]


def test_a_run_without_anything_says_how_to_get_it(tmp_path: Path) -> None:
    EventLog(tmp_path, 0).emit("warning", message="x")
    text = page(Overview.read(tmp_path))
    assert Page(text).sections == SECTIONS
    assert "--sparetrain-mode full" in text
    assert "No mismatch." in text
    assert "not ended regularly" in text
    (tmp_path / "profile.rank0.json").write_text("{}")
    assert "Not drawn: " in page(Overview.read(tmp_path))


def test_counters_begin_again_when_a_run_is_resumed(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    for iteration, checks, total in ((2, 1.0, 4.0), (4, 3.0, 8.0), (5, 0.5, 1.0), (7, 0.5, 5.0)):
        log.emit("iteration", iteration=iteration, seconds_in_checks=checks, seconds_total=total)
    assert progress(tmp_path) == {
        2: [(0.25, 2.0)],
        4: [(0.5, 2.0)],
        5: [(0.5, 1.0)],
        7: [(0.0, 2.0)],
    }


def test_spans_of_a_profile() -> None:
    found = spans(profile(0), None)
    assert [(kind, round(stop - start, 6)) for start, stop, kind, _ in found] == [
        ("forward", 8.0),
        ("waits for communication", 10.0),
        ("backward", 8.0),
    ]
    planned = spans(profile(0), plan(profile(0), 1 << 30, "full"))
    assert planned[-1][1] == pytest.approx(26.0)


def test_charts_with_little_in_them() -> None:
    for points in ([(1.0, 0.0)], [(1.0, 0.0), (2.0, 0.0)], [(5.0, 1e-9), (6.0, 3e5)]):
        svg = charts.line_chart({"a<b": points}, x_label="x", y_label="y")
        assert "nan" not in svg
        assert "a&lt;b" in svg
    assert charts._round_up(0.0) == 1.0
    assert [charts._round_up(value) for value in (1.0, 1.1, 2.1, 30, 0.06)] == [1, 2, 2.5, 50, 0.1]
    assert "<svg" in charts.stacked_bars({"naive": {"pure": 0}})
    assert "<svg" in charts.gantt({}, {}, "ms")


def test_errors(tmp_path: Path, capsys) -> None:
    assert cli.main(["report", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 2
    assert not (tmp_path / "x.html").exists()


MEASURE = """
<script>
const seen = {};
for (const section of document.querySelectorAll("section")) {
  const box = section.getBoundingClientRect();
  const shapes = [...section.querySelectorAll("svg rect, svg polyline, svg text")];
  seen[section.id] = {height: box.height, right: box.right,
    drawn: shapes.filter(shape => shape.getBoundingClientRect().width > 0).length};
}
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_every_section(run: Path, tmp_path: Path) -> None:
    plain = write_html(run, tmp_path / "report.html")
    measured = tmp_path / "measured.html"
    measured.write_text(plain.read_text().replace("</body>", MEASURE))

    def chromium(*flags: str) -> str:
        command = [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1050,2400"),
            *(f"--user-data-dir={tmp_path / 'browser'}", *flags),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    dom = chromium("--dump-dom", measured.as_uri())
    seen = json.loads(re.search(r'data-seen="([^"]*)"', dom)[1].replace("&quot;", '"'))
    assert list(seen) == SECTIONS
    for name, section in seen.items():
        assert section["height"] > 50, name
        assert section["right"] <= 1050, name
    for name in ("overhead", "checks", "timeline"):
        assert seen[name]["drawn"] >= 5, name
    picture = tmp_path / "report.png"
    chromium(f"--screenshot={picture}", plain.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 30_000, "an empty page"
