"""Checks a configuration and prints it resolved: `python tools/check_config.py CONFIG [key=value ...]`.

Presets, `extends`, overrides, rules across fields and every plugin node are checked as `moerl train` checks them, but
no model library is imported and nothing is written. Exit status 0, or 2 with every fault on standard error.

    python tools/check_config.py configs/demo/gspo.yaml optim.lr=1e-5 algorithm.routing=R3
"""

from __future__ import annotations

import argparse
import sys

from moerl.config.load import resolved_yaml
from moerl.configure import load
from moerl.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Print the resolved YAML to standard output, warnings and faults to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optim.lr=1e-5")
    options = parser.parse_args(arguments)
    try:
        cfg = load(options.config, options.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(resolved_yaml(cfg), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
