"""
Start-up hook: RL Zoo, when it is imported, learns of UATRPO and MatchedTRPO.

``sb3_uatrpo_zoo_hook.pth``, beside this file in site-packages, imports it when Python starts, because RL Zoo has no
plug-in mechanism. It imports nothing heavy: it puts a finder on ``sys.meta_path`` that stays idle until one of three
modules of rl_zoo3 is imported, and then adds to them what ``sb3_uatrpo.zoo.registration`` says. It warns instead of
raising, and ``SB3_UATRPO_NO_HOOK=1`` in the environment switches it off.
"""

import os
import sys

_MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


class _Finder:
    """Finds the three modules where Python would, and has each amended after it was executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_amend(module):
                execute(module)
                _amend(module)

            # the loader was made for this module alone
            spec.loader.exec_module = execute_and_amend
        return spec


def _amend(module):
    try:
        from sb3_uatrpo.zoo.registration import amend

        amend(module)
    except Exception as error:
        import warnings

        warnings.warn(
            f"sb3_uatrpo could not register with {module.__name__} ({type(error).__name__}: {error}); "
            "SB3_UATRPO_NO_HOOK=1 switches this hook off",
            stacklevel=2,
        )


def install():
    """Put the finder in place, unless it is there already or switched off."""
    if os.environ.get("SB3_UATRPO_NO_HOOK", "") in ("", "0") and not any(
        isinstance(finder, _Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())


install()
