"""The table of methods, made from the presets: for `moerl objective --list` and for docs/algorithms.md."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.algorithms.presets import PRESETS
from moerl.api import Method, objective


@dataclass(frozen=True)
class MethodRow:
    """One preset."""

    name: str
    summary: str
    paper: str
    """arXiv id, `survey`, or `-`."""
    point: str
    """Where it lies in the space: credit, ratio level, trust region, aggregation, and what else is not the default."""
    needs: str
    """What it reads beside log-probabilities and rewards, and what it asks of the rest of the configuration."""


@functools.cache
def method_rows() -> tuple[MethodRow, ...]:
    """Every preset, in the order of the table."""
    return tuple(_row(name) for name in PRESETS)


def markdown_table(rows: Sequence[MethodRow]) -> str:
    """The rows as a Markdown table, without a final newline."""
    head = ["| preset | what it is | paper | point of the space | needs |", "|---|---|---|---|---|"]
    body = [f"| `{r.name}` | {r.summary} | {_paper(r.paper)} | {r.point} | {r.needs} |" for r in rows]
    return "\n".join([*head, *body])


def _row(name: str) -> MethodRow:
    method = objective(name, max_new_tokens=1)
    preset = PRESETS[name]
    return MethodRow(name, preset.summary, preset.paper, _point(method), _needs(method, preset.elsewhere))


def _point(method: Method) -> str:
    a = method.section
    parts = [
        f"{a.advantage.center}/{a.advantage.scale}",
        a.level,
        _node(a.trust),
        str(a.aggregation["name"]),
    ]
    if a.form == "score":
        parts.append("score")
    if a.anchor != "old":
        parts.append(f"anchor {a.anchor}")
    nodes = (
        ("objective", a.objective),
        ("transform", a.advantage.transform),
        ("post", a.advantage.post),
        ("token weight", a.token_weight),
        ("schedule", a.schedule),
        ("", a.correction),
    )
    for axis, node in nodes:
        if node["name"] not in ("identity", "none", "policy_gradient", "one", "joint"):
            parts.append(f"{axis} {_node(node)}".strip())
    if a.router_shift.enabled:
        parts.append(f"router shift {a.router_shift.stage}")
    if a.kl.place != "none":
        parts.append(f"{a.kl.estimator} {a.kl.coefficient:g} in {a.kl.place}")
    if a.positive_nll.coefficient:
        parts.append(f"likelihood of right answers {a.positive_nll.coefficient:g}")
    parts += [_node(node) for node in (*a.shaping, *a.filters)]
    return ", ".join(parts)


def _node(node: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{key}={_text(value)}" for key, value in node.items() if key not in ("name", "max_tokens"))
    return f"{node['name']}({arguments})" if arguments else str(node["name"])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _needs(method: Method, elsewhere: Mapping[str, Any]) -> str:
    asks = [f"{key}={value}" if "." in key else str(value) for key, value in elsewhere.items()]
    return "; ".join([", ".join(method.needs) or "nothing else", *asks])


def _paper(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper})" if paper[:4].isdigit() else paper
