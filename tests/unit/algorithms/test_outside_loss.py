"""The worked example of CONTRIBUTING.md, taken out of the page, lives outside the package and trains a policy."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moerl
from moerl.algorithms.registries import trust_regions
from moerl.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "CONTRIBUTING.md"
NAME = "outside_of_moerl.spo:spo_of_page"


def examples() -> tuple[str, ...]:
    """(the loss, its test) as the page has them, under a name that no loss of the package can have."""
    section = PAGE.read_text()[PAGE.read_text().index("## Adding a policy loss") :]
    loss, test = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return tuple(text.replace('"spo"', '"spo_of_page"') for text in (loss, test))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """An installed package with the loss; gone from the registry and from the interpreter afterwards."""
    package = tmp_path / "outside_of_moerl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "spo.py").write_text(examples()[0])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = dict(trust_regions._plugins)
    yield
    trust_regions._plugins.clear()
    trust_regions._plugins.update(before)
    for name in ("outside_of_moerl", "outside_of_moerl.spo"):
        sys.modules.pop(name, None)


def test_the_example_is_under_forty_lines():
    loss, test = examples()
    assert len(loss.splitlines()) < 40
    assert len(test.splitlines()) < 30


@pytest.mark.usefixtures("outside")
def test_the_test_of_the_page_passes():
    with pytest.raises(ConfigError, match="no trust region is called 'spo_of_page'"):
        moerl.objective(trust={"name": "spo_of_page"})
    moerl.objective(trust={"name": NAME})
    space: dict[str, Any] = {}
    exec(examples()[1], space)
    space["test_spo_equals_its_closed_form"]()


@pytest.mark.usefixtures("outside")
def test_it_composes_with_other_axes_and_reports_its_metric():
    method = moerl.objective("gspo", trust={"name": NAME, "eps": 0.5}, correction={"name": "tis"})
    old = torch.tensor([-1.0, -2.0, -1.5])
    result = method(
        logprobs=old + torch.tensor([0.7, 0.7, 0.0]),
        old_logprobs=old,
        rollout_logprobs=old,
        seq_ids=torch.tensor([0, 0, 1]),
        advantages=torch.tensor([1.0, -1.0]),
    )
    assert result.metrics["pg/spo_beyond"] == pytest.approx(2 / 3)
    assert result.gradient[0] == result.gradient[1]  # one ratio per sequence


@pytest.mark.usefixtures("outside")
def test_a_policy_trained_with_it_prefers_the_rewarded_answer():
    """One token, eight answers, reward for the third: exact policy gradient ascent by SPO's objective."""
    logits = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    method = moerl.objective(trust={"name": NAME}, advantage={"center": "group_mean", "scale": "none"})
    optimizer = torch.optim.SGD([logits], lr=1.0)
    rewards = torch.zeros(8)
    rewards[3] = 1.0
    for _ in range(60):
        old = logits.detach().log_softmax(0)
        for _ in range(2):
            optimizer.zero_grad()
            result = method(
                logprobs=logits.log_softmax(0),
                old_logprobs=old,
                seq_ids=torch.arange(8),
                rewards=rewards,
                group_ids=torch.zeros(8, dtype=torch.int64),
            )
            result.loss.backward()
            optimizer.step()
    assert logits.softmax(0)[3] > 0.9


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"name": "outside_of_moerl.nothing:spo"}, "cannot import 'outside_of_moerl.nothing'"),
        ({"name": "outside_of_moerl.spo:sop_of_page"}, "did you mean 'spo_of_page'"),
        ({"name": NAME, "epsilon": 1.0}, "did you mean 'eps'"),
        ({"name": NAME, "eps": -1.0}, "trust.eps"),
    ],
)
def test_what_is_wrong_with_it_is_said(node, message):
    with pytest.raises(ConfigError, match=message):
        moerl.objective(trust=node)
