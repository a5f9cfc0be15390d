"""
Start-up hook that registers UATRPO and MatchedTRPO with RL Zoo when RL Zoo is imported.

RL Zoo has no plug-in mechanism, so ``sb3_uatrpo_zoo_hook.pth``, beside this file in site-packages, imports this module
whenever Python starts. It imports nothing heavy: it puts a finder on ``sys.meta_path`` that stays idle until one of
three modules of rl_zoo3 is imported, then patches that module by ``sb3_uatrpo.zoo.registration``. It warns instead
of raising errors, and ``SB3_UATRPO_NO_HOOK=1`` in the environment switches it off.
"""

import os
import sys

_MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")


def _is_ours(finder):
    # by name: this module may have been imported twice
    return type(finder).__module__ == __name__


class _Finder:
    """Patches each of the three modules after its execution, for any finder and loader."""

    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            spec = None if _is_ours(finder) or find_spec is None else find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if not hasattr(spec.loader, "exec_module"):
            return spec
        from copy import copy

        # the finder's spec and its loader, which may serve other modules too, stay untouched
        patched = copy(spec)
        patched.loader = _Loader(spec.loader)
        return patched


class _Loader:
    """Stands in for a module's loader until the module is executed."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        if name == "loader":
            # not set yet while this object is being unpickled or copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec):
        create_module = getattr(self.loader, "create_module", None)
        return None if create_module is None else create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _amend(module)


def _amend(module):
    try:
        from sb3_uatrpo.zoo.registration import patch

        patch(module)
    except Exception as error:
        _say(
            f"sb3_uatrpo could not register with {module.__name__} ({type(error).__name__}: {error}); "
            "SB3_UATRPO_NO_HOOK=1 switches this hook off"
        )


def _say(what):
    """Warn. Where warnings are errors, print a line instead, so that nobody else's import fails."""
    import warnings

    try:
        warnings.warn(what, stacklevel=3)
    except Warning:
        print(what, file=sys.stderr)


def install():
    """Install the finder, unless it is installed already or switched off."""
    if os.environ.get("SB3_UATRPO_NO_HOOK", "") in ("", "0") and not any(map(_is_ours, sys.meta_path)):
        sys.meta_path.insert(0, _Finder())


install()
