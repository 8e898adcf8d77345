"""What the server of `forked` imports: what a run imports, the gate to megatron first."""

# ruff: noqa: F401
import moerl.mcore  # isort: skip

import aiohttp
import math_verify
import transformers

import moerl.algorithms.presets
import moerl.build
import moerl.commands.eval
import moerl.commands.train
import moerl.finish
import moerl.loop
import moerl.mcore.policy
import moerl.reference.model
import moerl.rollout.engines.sglang_engine
