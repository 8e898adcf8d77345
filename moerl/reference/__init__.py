"""The oracle: an independent plain-torch mixture-of-experts model with Hugging Face names, and sampling on it."""
