"""
RL Zoo's scripts, without the start-up hook: ``python -m sb3_uatrpo.zoo train --algo uatrpo --env Hopper-v4``.

The first argument is the module that ``python -m rl_zoo3.…`` would run. The others are passed to it unchanged.
"""

import runpy
import sys
from importlib.util import find_spec

from sb3_uatrpo.zoo.registration import register

# without record_training and benchmark, which start other processes, where only the hook would register our algorithms
SCRIPTS = {
    "train": "train",
    "enjoy": "enjoy",
    "record_video": "record_video",
    "load_from_hub": "load_from_hub",
    "push_to_hub": "push_to_hub",
    "plot_train": "plots.plot_train",
    "plot_from_file": "plots.plot_from_file",
    "all_plots": "plots.all_plots",
}


def main() -> None:
    """
    Register our algorithms and run a script of RL Zoo.

    :raises SystemExit: if RL Zoo is missing, or has no such script
    """
    if find_spec("rl_zoo3") is None:
        sys.exit('rl_zoo3 is not installed: run pip install ".[zoo]" in a clone of sb3_uatrpo')
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(f"usage: python -m sb3_uatrpo.zoo SCRIPT ...\n{__doc__}\nSCRIPT is one of {', '.join(SCRIPTS)}.")
        return
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        given = repr(sys.argv[1]) if len(sys.argv) > 1 else "missing"
        print(f"the script must be one of {', '.join(SCRIPTS)}, but it is {given}", file=sys.stderr)
        sys.exit(2)
    register()
    script = SCRIPTS[sys.argv.pop(1)]
    runpy.run_module(f"rl_zoo3.{script}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
