"""Typed, strict configuration: omegaconf structured configs, `extends`, `key=value` overrides, cross-field rules."""
