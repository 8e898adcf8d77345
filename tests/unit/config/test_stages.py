"""Where the layers of an uneven pipeline lie: each once, in order, as asked; what is said where they cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stage_splits import splits, stages

from moerl.config.stages import StageSplit, as_option

PUBLISHED = {"DeepSeek-V3, Kimi-K2": 61, "GLM-4.7-Flash": 47, "Qwen3-235B-A22B": 94, "GLM-4.5": 92, "MiniMax-M2": 62}


@pytest.mark.parametrize("layers", [3, 5, 8, 12])
def test_every_stage_holds_what_it_was_given_and_the_others_share_the_rest(layers):
    found = splits(layers)
    assert any(split.first and split.last and split.pipeline > 2 for split in found) == (layers > 2)
    for split in found:
        counts = [len(held) for held in stages(split, layers)]
        assert counts == split.counts(layers)
        assert sum(counts) == layers
        assert split.first in (None, counts[0])
        assert split.last in (None, counts[-1])
        middle = counts[split.first is not None : split.pipeline - (split.last is not None)]
        assert len(set(middle)) <= 1
        assert not list(split.faults(layers))


def test_chunks_go_around_the_stages_as_megatron_says():
    assert stages(StageSplit(pipeline=2, virtual=2), 8) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert stages(StageSplit(pipeline=2, virtual=2, first=2), 8) == [[0, 4], [1, 2, 3, 5, 6, 7]]
    assert stages(StageSplit(pipeline=3, last=1), 5) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("layers", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("pipeline", [2, 4, 8, 16])
def test_what_is_proposed_for_published_models_fits(layers, pipeline):
    (fault,) = list(StageSplit(pipeline=pipeline).faults(layers)) or [""]
    assert bool(fault) == bool(layers % pipeline)
    if fault:
        last = int(fault.split("parallel.last_stage_layers=")[1].split(",")[0])
        counts = StageSplit(pipeline=pipeline, last=last).counts(layers)
        assert sum(counts) == layers
        assert max(counts) == -(-layers // pipeline)  # no longer than the longest stage of any cut


def test_the_table_in_the_readme_is_right():
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| `([^`]+)` \| ([\d, ]+) \|$", readme, re.MULTILINE)
    assert {name for name, *_ in rows} == PUBLISHED.keys()
    for name, layers, pipeline, settings, counts in rows:
        ends = {end: int(number) for end, number in re.findall(r"parallel\.(first|last)_stage_layers=(\d+)", settings)}
        split = StageSplit(pipeline=int(pipeline), **ends)
        assert PUBLISHED[name] == int(layers)
        assert split.fits(int(layers))
        assert split.counts(int(layers)) == [int(count) for count in counts.split(", ")]


SAID = [
    (
        {"pipeline": 4},
        61,
        "--pipeline is 4, but must divide the model's 61 layers; set --last-stage-layers=13, which leaves 48 over 3: "
        "16 each",
    ),
    (
        {"pipeline": 4, "first": 12},
        61,
        "61 layers over 4 stages: 61 - 12 in the first leave 49 over 3 stages, which 3 does not divide; set "
        "--first-stage-layers=13, which leaves 48 over 3: 16 each",
    ),
    (
        {"pipeline": 4, "first": 10, "last": 12},
        61,
        "61 layers over 4 stages: 61 - 10 in the first - 12 in the last leave 39 over 2 stages, which 2 does "
        "not divide; set --first-stage-layers=15, which leaves 34 over 2: 17 each",
    ),
    (
        {"pipeline": 2, "first": 10, "last": 12},
        61,
        "61 layers over 2 stages: 61 - 10 in the first - 12 in the last leave 39 over 0 stages, but two stages are "
        "all that there are; set --first-stage-layers=49",
    ),
    (
        {"pipeline": 4, "virtual": 2, "last": 60},
        62,
        "62 layers over 4 stages: 62 - 60 in the last leave 2 over 3 stages, but each needs at least one for each of "
        "--virtual-pipeline=2; set --last-stage-layers=14, which leaves 48 over 3: 16 each",
    ),
    (
        {"pipeline": 4, "virtual": 2, "first": 13},
        61,
        "61 layers over 4 stages: 61 - 13 in the first leave 48 over 3 stages, but --virtual-pipeline is 2 and must "
        "divide the layers of each stage; set --virtual-pipeline to a divisor of 61, or leave it out",
    ),
    (
        {"pipeline": 9},
        8,
        "--pipeline is 9, but must divide the model's 8 layers; a stage for each of 8 layers is the most that there "
        "can be, so take fewer",
    ),
    (
        {"last": 3},
        8,
        "--last-stage-layers is 3 with --pipeline=1, but it says how many of a pipeline's layers one stage holds: "
        "leave it out",
    ),
]


@pytest.mark.parametrize(("sizes", "layers", "said"), SAID)
def test_the_sum_is_written_out(sizes, layers, said):
    assert list(StageSplit(**sizes).faults(layers, as_option)) == [said]
