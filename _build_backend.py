"""
setuptools' build backend, with the start-up hook of RL Zoo added to every wheel, editable ones included.

The hook is a module at the root of the wheel and two files that name it: a ``.pth`` file, and for Python 3.15 and later
a ``.start`` file (PEP 829). setuptools has no public way to put them into an editable wheel, so they are added after
the wheel is built.
"""

import tempfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from wheel.wheelfile import WheelFile

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HOOK = "sb3_uatrpo_zoo_hook"


def _with_hook(wheel_directory: str, name: str) -> str:
    wheel = Path(wheel_directory) / name
    with tempfile.TemporaryDirectory() as folder:
        with WheelFile(wheel) as built:
            built.extractall(folder)
        source = Path(__file__).with_name(f"{HOOK}.py")
        (Path(folder) / source.name).write_bytes(source.read_bytes())
        (Path(folder) / f"{HOOK}.pth").write_text(f"import {HOOK}\n")
        (Path(folder) / f"{HOOK}.start").write_text(f"{HOOK}:install\n")
        wheel.unlink()
        # rewrites RECORD
        with WheelFile(wheel, "w") as completed:
            completed.write_files(folder)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517."""
    return _with_hook(wheel_directory, build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 660."""
    return _with_hook(wheel_directory, build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
