"""Recomputation gives the gradients of a pass that keeps its activations, whatever is frozen."""

from __future__ import annotations

import pytest

DENSE = (
    r"model\.embed_tokens\.weight",
    r".*self_attn\..*",
    r".*norm\.weight",
    r"lm_head\.weight",
    r".*mlp\.gate\.weight",
)


@pytest.mark.parametrize(
    "frozen", [DENSE[:1], (*DENSE, r"model\.layers\.1\.mlp\..*")], ids=["embedding", "but experts"]
)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_reaches_what_lies_behind_frozen_weights(kit, tiny_folder, mode, frozen):
    """Megatron recomputes a part whose inputs have no gradient as one without gradients: nothing in it would train."""
    plain, again = (
        kit.make_policy(tiny_folder, recompute=recompute, model={"freeze": list(frozen)}).gradients(
            [kit.make_micro([7, 4, 6])], kit.Nll()
        )
        for recompute in ("none", mode)
    )
    assert plain.keys() == again.keys()
    assert any(grad.any() for name, grad in plain.items() if ".experts." in name)
    for name, grad in plain.items():
        assert (again[name] - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-9, name
