"""How drawn cases are drawn: the same ones every time, so that a run that passed passes again.

`pytest --hypothesis-profile=random` draws new ones; what it finds is printed as a `@reproduce_failure` to be pasted.
"""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow])
"""No verdict depends on the machine's speed."""
settings.register_profile("fixed", COMMON, derandomize=True)
settings.register_profile("random", COMMON, derandomize=False)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As under `nohup ... &`: Ctrl-C would be ignored here and in every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
