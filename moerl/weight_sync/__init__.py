"""From the trainer's weights to the engines: an iterator of named tensors in, a raised policy version out."""
