"""Policy-optimisation mathematics: pure functions of tensors. Imports torch and nothing of the stack above it."""
