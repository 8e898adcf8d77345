r"""1 where the extracted answer is mathematically equal to the gold answer (PyPI `math-verify`), inside the pool.

Answers that equal the gold answer as strings or as plain numbers are decided here by comparison; everything else goes
to `judges/math.py`, which states the rules (several parts, per cent, words, what is never trusted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from moerl.rewards import rewards
from moerl.rewards.base import RewardConfig, check_choice, judge, need_answers
from moerl.rewards.extract import EXTRACTS, extract_answer, last_boxed
from moerl.rewards.pool import SandboxPool

if TYPE_CHECKING:
    from moerl.types import Prompt

_JUDGE = "moerl.rewards.judges.math"
_BATCH = 32
_MAX_DIGITS = 60


@dataclass
class MathVerifyConfig(RewardConfig):
    """Where the answer is."""

    extract: str = "boxed"
    """`boxed`, `last_line`, `answer_tag` or `all`."""


@rewards.register("math_verify", MathVerifyConfig)
class MathVerify:
    """Mathematical equality; the gold answer always goes first, since math-verify's comparison is not symmetric."""

    def __init__(self, config: MathVerifyConfig, pool: SandboxPool) -> None:
        check_choice(config.extract, EXTRACTS, where="reward math_verify: extract")
        self._config = config
        self._pool = pool

    async def score(self, prompt: Prompt, text: str) -> float:
        """0 where there is no answer to extract."""
        answer = extract_answer(text, self._config.extract)
        if not answer:
            return 0.0
        gold = bare_gold(prompt.answer or "")
        known = quick_equal(gold, answer)
        if known is None:
            known = await judge(self._pool, f"{_JUDGE}:is_equal", gold=gold, answer=answer)
        return float(known)

    def check(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Whether every gold answer parses."""
        problems = need_answers(prompts)
        doubtful = [
            i
            for i, prompt in enumerate(prompts)
            if problems[i] is None and plain_number(bare_gold(prompt.answer or "")) is None
        ]
        batches = [doubtful[start : start + _BATCH] for start in range(0, len(doubtful), _BATCH)]
        golds = [bare_gold(prompt.answer or "") for prompt in prompts]
        pending = [self._pool.submit(f"{_JUDGE}:unparsable", {"golds": [golds[i] for i in batch]}) for batch in batches]
        for batch, future in zip(batches, pending, strict=True):
            verdict = future.result()
            reasons = verdict.value if not verdict.error else [self._check_one(golds[i]) for i in batch]
            for i, reason in zip(batch, reasons, strict=True):
                problems[i] = reason
        return problems

    def _check_one(self, gold: str) -> str | None:
        """Alone, because its batch did not come through."""
        verdict = self._pool.submit(f"{_JUDGE}:unparsable", {"golds": [gold]}).result()
        return f"gold answer {gold[:60]!r}: {verdict.error} ({verdict.text})" if verdict.error else verdict.value[0]


def bare_gold(gold: str) -> str:
    r"""The gold answer without its wrapping: `\boxed{}`, `$...$`, `\(...\)`, `\[...\]`, `**...**`, a full stop."""
    boxed = last_boxed(gold)
    gold = (gold if boxed is None else boxed).strip()
    for opening, closing in (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = gold[len(opening) : -len(closing)]
        if gold.startswith(opening) and gold.endswith(closing) and inner and opening not in inner:
            gold = inner.strip()
    return gold[:-1].rstrip() if gold.endswith(".") and len(gold) > 1 else gold


def quick_equal(gold: str, answer: str) -> bool | None:
    """True or False where string or plain number comparison decides, else None."""
    if gold == answer:
        return True
    numbers = plain_number(gold), plain_number(answer)
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0] == numbers[1]


def plain_number(text: str) -> Decimal | None:
    """The value of `-12`, `3.50` or `+7`; None for anything else, thousands separators included."""
    text = text.strip()
    digits = text[1:] if text[:1] in ("+", "-") else text
    whole, point, fraction = digits.partition(".")
    parts = [whole, fraction] if point else [whole]
    if len(digits) > _MAX_DIGITS or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    return Decimal(text)
