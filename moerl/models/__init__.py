"""Model families: how Hugging Face names and shapes map to Megatron's. Pure tensor reshapes, no megatron."""
