"""Functions that run inside the sandbox on a model's text: plain JSON in, plain JSON out, and no import of torch."""
