"""The table of `moerl eval --compare-templates`: what is in it, and in which order."""

from __future__ import annotations

from rich.console import Console

from moerl.commands.eval import comparison_table
from moerl.compare_templates import TemplateComparison

VALUES = {
    "eval/errors_greedy": 0.0,
    "eval/maj@3": 0.5,
    "eval/pass@16": 0.9,
    "eval/pass@2": 0.7,
    "eval/format_fraction_greedy": 1.0,
    "eval/accuracy_greedy": 0.25,
    "eval/hard/accuracy_greedy": 0.125,
    "eval/easy/accuracy_greedy": 0.375,
}


def rows(found, width=100):
    console = Console(width=width, record=True, file=None)
    with console.capture() as capture:
        console.print(comparison_table(found))
    lines = [line.strip("│┃ ") for line in capture.get().splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in lines]


def test_metrics_go_down_in_the_order_of_reading_and_templates_across():
    none = dict(VALUES)
    r1 = {**VALUES, "eval/accuracy_greedy": 0.5}
    del r1["eval/maj@3"]
    found = TemplateComparison(
        "policy", {"none": none, "r1": r1}, {"none": ("boxed",), "r1": ("answer_tag", "all")}, {}, 7, 0
    )
    table = rows(found)
    assert table[0] == ["none", "r1"] or table[0] == ["", "none", "r1"]
    assert table[1:] == [
        ["answer read in", "boxed", "answer_tag, all"],
        ["accuracy greedy", "0.250", "0.500"],
        ["pass@2", "0.700", "0.700"],
        ["pass@16", "0.900", "0.900"],
        ["maj@3", "0.500", "-"],
        ["format fraction greedy", "1.000", "1.000"],
        ["errors greedy", "0.000", "0.000"],
        ["easy/accuracy greedy", "0.375", "0.375"],
        ["hard/accuracy greedy", "0.125", "0.125"],
    ]


def test_rewards_that_look_nowhere_are_a_dash():
    found = TemplateComparison("policy", {"none": {}}, {"none": ()}, {"r1": "too long"}, 7, 2)
    assert rows(found)[1] == ["answer read in", "-"]
