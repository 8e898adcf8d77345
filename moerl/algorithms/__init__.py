"""Policy-optimisation mathematics: pure functions of tensors that know nothing of ranks, devices or models.

`presets`, `compose`, `checks` and `registries` import without torch.
"""
