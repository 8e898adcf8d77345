"""moerl: reinforcement learning of mixture-of-experts language models on Megatron-Core."""

__version__ = "0.1.0"
