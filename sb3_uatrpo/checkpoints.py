"""Which algorithm saved a file?"""

import io
import json
import pathlib
import zipfile

from stable_baselines3.common.save_util import open_path

# At least one of them tells the files of this package from those of others, whatever was excluded from them
_OWN_SETTINGS = frozenset({"adversarial_noise", "fast_rollouts", "line_search_kl_factor"})


def refuse_other_algorithms(name: str, has_sketch: bool, path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """
    The parameters of other algorithms may fit, and settings of the same name, but on other scales.

    :param name: of the class that is about to load the file
    :param has_sketch: whether its files contain a sketch
    :param path: the file
    :raises ValueError: if another algorithm saved it
    """
    file = open_path(path, "r", suffix="zip")
    start = file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            settings = json.loads(archive.read("data")) if "data" in names else None
    except zipfile.BadZipFile:
        # Stable-Baselines3 has a message for it
        settings = None
    finally:
        if file is path:
            file.seek(start)
        else:
            file.close()
    if settings is not None and not (_OWN_SETTINGS & settings.keys() and has_sketch == ("sketch.pth" in names)):
        raise ValueError(f"path must be a file that {name} saved, but another algorithm saved {path}")
