"""The learner: the only room that imports megatron. Importing any module of this package opens the gate to it first.

`open_gate` installs the CPU backend where there is no GPU, checks the version, and explains a broken TransformerEngine
or a foreign `apex` before megatron would die of them with a bare traceback.
"""

from moerl.mcore.cpu_backend import open_gate

open_gate()
