"""DeepSeek-V2's routers and GLM-4.7-Flash's list of layers: what is taken and what is refused."""

from __future__ import annotations

import re

import pytest
from tiny_models import LATENT_LISTED, LATENT_SOFTMAX, make_model

from moerl.errors import CheckpointError
from moerl.models.family import family_of


@pytest.fixture(scope="module")
def configs():
    made = {}
    for kind, sizes in (("latent_softmax", LATENT_SOFTMAX), ("latent_listed", LATENT_LISTED)):
        model = make_model(kind)
        made[kind] = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
        for name in ("hidden_act", "tie_word_embeddings", "topk_method", "rope_interleave", "rms_norm_eps"):
            if hasattr(model.config, name):
                made[kind][name] = getattr(model.config, name)
        made[kind] |= {name: value for name, value in sizes.items() if value is not None}
    return made


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("latent_softmax", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("latent_softmax", {"mlp_bias": True}, "mlp_bias is True"),
        ("latent_softmax", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (
            "latent_softmax",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "3 experts per token from 1 of 4 groups by 'group_limited_greedy', which scores a group by its best",
        ),
        (
            "latent_softmax",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
            "with 8 experts; groups must be equal",
        ),
        ("latent_listed", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types is ['sparse'"),
        ("latent_listed", {"mlp_layer_types": ["dense"]}, "4 layers are needed"),
        ("latent_listed", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, which is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(configs, kind, changes, told):
    hf = {**configs[kind], **changes}
    with pytest.raises(CheckpointError, match=re.escape(told)):
        family_of(hf).transformer_kwargs(hf)


def test_a_number_says_what_the_list_says(configs):
    listed = configs["latent_listed"]
    numbered = {**listed, "mlp_layer_types": None, "first_k_dense_replace": 1}
    assert family_of(listed).transformer_kwargs(listed) == family_of(numbered).transformer_kwargs(numbered)
    assert family_of(listed).transformer_kwargs(listed)["moe_layer_freq"] == [0, 1, 1, 1]


def test_one_expert_of_each_group_is_what_megatron_computes(configs):
    hf = configs["latent_softmax"] | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    settings = family_of(hf | {"num_experts_per_tok": 2}).transformer_kwargs(hf | {"num_experts_per_tok": 2})
    assert (settings["moe_router_num_groups"], settings["moe_router_group_topk"]) == (4, 2)
