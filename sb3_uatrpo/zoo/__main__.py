"""
RL Zoo's scripts, without the start-up hook: python -m sb3_uatrpo.zoo train --algo uatrpo --env Hopper-v4

The first argument is the module that "python -m rl_zoo3.…" would run. The others are passed to it unchanged.
"""

import argparse
import runpy
import sys
from importlib.util import find_spec

from sb3_uatrpo.zoo.registration import register

# without record_training and benchmark, which start other processes, where only the hook would register our algorithms
PLOTS = ("plot_train", "plot_from_file", "all_plots")
SCRIPTS = ("train", "enjoy", "record_video", "load_from_hub", "push_to_hub", *PLOTS)


def main() -> None:
    """Register our algorithms and run a script of RL Zoo."""
    if find_spec("rl_zoo3") is None:
        sys.exit('rl_zoo3 is not installed: run pip install ".[zoo]" in a clone of sb3_uatrpo')
    parser = argparse.ArgumentParser(prog="python -m sb3_uatrpo.zoo", description=__doc__)
    parser.add_argument("script", choices=SCRIPTS, metavar="SCRIPT", help=", ".join(SCRIPTS))
    script = parser.parse_args(sys.argv[1:2]).script
    del sys.argv[1]
    register()
    runpy.run_module(f"rl_zoo3.{'plots.' * (script in PLOTS)}{script}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
