"""Prompts in, packed batches out: files and generators, chat template, mixtures with a saved cursor, packing, dumps."""
