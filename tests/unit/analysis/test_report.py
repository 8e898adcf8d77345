from __future__ import annotations

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moerl.__main__ import main
from moerl.analysis.plots import running_mean
from moerl.analysis.report import number_text, write_report


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_run = _load("fake_run")


class _Page(HTMLParser):
    """Checks that tags nest, and collects what tests ask for."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.titles: list[str] = []
        self.labels: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href", "clip-path"):
                self.references.append(str(value))
            if name == "aria-label" and tag == "svg":
                self.labels.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.write_fake_run(tmp_path_factory.mktemp("runs") / "demo-gspo", num_steps=30)


@pytest.fixture(scope="module")
def page(run_folder: Path) -> tuple[str, _Page]:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, _Page(text)


def test_every_plot_that_a_person_wants_is_there(page: tuple[str, _Page]) -> None:
    assert page[1].titles == [
        "Reward",
        "Reward by component",
        "Held-out accuracy",
        "Votes and best of several",
        "Held-out accuracy by set",
        "Response length",
        "Response length by verdict",
        "Entropy",
        "Loss",
        "Groups without a signal",
        "Failures",
        "Diversity",
        "Reward spread",
        "Certainty",
        "Reflection",
        "Prompts never and always solved",
        "Pass rates",
        "Clip fraction",
        "KL",
        "Probability ratio",
        "Gradient norm",
        "Learning rate",
        "KL estimate k3",
        "Log-probability difference",
        "Extreme tokens",
        "Effective sample size",
        "Rollout against learner",
        "Over one step's updates",
        "Over one step, on the fixed probe",
        "Since the start, on the fixed probe",
        "Drift per step, by layer",
        "Load by layer and expert, step 1",
        "Load by layer and expert, step 30",
        "Load moved since the start, by layer",
        "Unevenness",
        "Busiest and idlest expert",
        "Dead experts",
        "Seconds by phase",
        "Tokens per second",
    ]


def test_the_page_needs_nothing_but_itself(page: tuple[str, _Page]) -> None:
    text, parsed = page
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    inside = [ref for ref in parsed.references if not ref.startswith("data:image/png;base64,")]
    ids = set(parsed.ids)
    assert inside
    for reference in inside:
        target = re.fullmatch(r"(?:url\()?#([^)]+)\)?", reference)
        assert target is not None, reference
        assert target[1] in ids
    assert len(ids) == len(parsed.ids), "an id is there twice"
    assert "@import" not in text


def test_charts_have_words_and_the_colours_of_the_page(page: tuple[str, _Page]) -> None:
    text, parsed = page
    assert len(parsed.labels) == len(parsed.titles)
    reward = parsed.labels[0]
    assert reward.startswith("Reward by step. reward/mean: 0.")
    assert "busiest: expert" in parsed.labels[parsed.titles.index("Load by layer and expert, step 30")].lower()
    assert "#00fe" not in text
    assert text.count("stroke: var(--c0)") >= 20
    assert "prefers-color-scheme: dark" in text


def test_values_that_are_all_but_equal_are_a_level_line(page: tuple[str, _Page]) -> None:
    text, _ = page
    ratio = text[text.index("<h3>Probability ratio</h3>") :]
    ticks = re.findall(r"<text[^>]*>([^<]*)</text>", ratio[: ratio.index("</svg>")])
    assert "1.00" in ticks
    assert not any("e" in tick for tick in ticks if tick != "step")


def test_text_of_the_run_is_escaped(page: tuple[str, _Page]) -> None:
    text, _ = page
    assert "<script>" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;quotes&#34; &lt;b&gt;bold&lt;/b&gt;" in text
    assert "preset: gspo  # &lt;tag&gt; &amp; co" in text


def test_the_same_run_gives_the_same_page(run_folder: Path, page: tuple[str, _Page]) -> None:
    assert write_report(run_folder).read_text(encoding="utf-8") == page[0]


def test_summary_is_on_top_and_samples_are_spread(page: tuple[str, _Page]) -> None:
    text, _ = page
    assert "Finished: 30 steps in 83.4 s, seed 0." in text
    assert re.search(r"Accuracy, greedy</dt><dd>0.152 → 0.95", text)
    steps = [int(step) for step in re.findall(r'data-label="step">(\d+)<', text)]
    assert len(steps) == 24
    assert (min(steps), max(steps)) == (1, 30)
    assert "verifier ran past 5 s" in text


def test_a_run_with_one_number_has_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "pg/entropy": null}\n{"step": 2, "rew')
    text = write_report(tmp_path).read_text(encoding="utf-8")
    parsed = _Page(text)
    assert parsed.titles == ["Reward"]
    assert "Not finished: 1 steps so far" in text
    assert "the last line is torn" in text
    assert re.search(r"no such metric:.* Entropy,", text)
    assert "Load by layer and expert" in text


def test_the_summary_of_an_earlier_end_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 1, "seconds": 5}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "Finished: 1 steps in 5.0 s" in write_report(tmp_path).read_text(encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5}\n')
    assert "Not finished: 2 steps so far" in write_report(tmp_path).read_text(encoding="utf-8")


def test_many_layers_become_heat_maps_and_many_sets_stay_readable(tmp_path: Path) -> None:
    folder = fake_run.write_fake_run(tmp_path / "big", num_steps=12, num_layers=24, num_experts=64, finished=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {f"eval/<set {i}>/accuracy_greedy": 0.5 for i in range(20)}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(folder).read_text(encoding="utf-8")
    parsed = _Page(text)
    by_layer = parsed.labels[parsed.titles.index("Drift per step, by layer")]
    assert by_layer == "Drift per step, by layer: 24 layers, steps 1 to 12; largest in layer 23."
    assert "The first 16 of 22 are shown." in text
    assert "<set" not in text


def test_running_mean_keeps_constants_ends_and_gaps() -> None:
    assert running_mean(np.ones(23)) is None
    ramp = np.arange(48, dtype=float)
    mean = running_mean(ramp)
    assert mean is not None
    np.testing.assert_allclose(mean[2:-2], ramp[2:-2])
    assert mean[0] == 1.0
    gaps = np.ones(48)
    gaps[10:20] = np.nan
    smooth = running_mean(gaps)
    assert smooth is not None
    np.testing.assert_array_equal(np.isnan(smooth), [12 <= i < 18 for i in range(48)])
    assert np.nanmin(smooth) == np.nanmax(smooth) == 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (0.15234, "0.152"),
        (1.5e-5, "1.50e-05"),
        (12345.6, "12,346"),
        (7, "7"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_the_command_writes_the_page_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main(["report", str(tmp_path / "nope")]) == 2
    assert "nope: no such run folder" in capsys.readouterr().err


def test_reading_a_run_imports_no_heavy_library() -> None:
    import subprocess

    program = (
        "import sys, moerl.analysis.report, moerl.analysis.compare; print({'matplotlib', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
