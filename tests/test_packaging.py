"""What is published: the contents of wheel and sdist, their metadata, and one version everywhere."""

import configparser
import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from sb3_uatrpo import __version__
from tests.installing import run

ROOT = Path(__file__).parents[1]
HOOK = "sb3_uatrpo_zoo_hook"
PACKAGE = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "sb3_uatrpo").rglob("*")
    if path.is_file() and path.suffix in (".py", ".yml", ".typed")
}
DOCUMENTS = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md"}
BUILD = {"MANIFEST.in", "_build_backend.py", "pyproject.toml", "setup.cfg"}
EGG_INFO = {"PKG-INFO", "SOURCES.txt", "dependency_links.txt", "requires.txt", "top_level.txt"}


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        return Parser().parsestr(wheel.read(f"sb3_uatrpo-{__version__}.dist-info/METADATA").decode())


def test_wheel_and_sdist_hold_the_package_and_what_it_needs(built):
    dist_info = f"sb3_uatrpo-{__version__}.dist-info"
    about = {f"{dist_info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        assert wheel.testzip() is None
        assert set(wheel.namelist()) == PACKAGE | {f"{HOOK}{suffix}" for suffix in (".py", ".pth", ".start")} | about
    with tarfile.open(built["sdist"]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    made = {"PKG-INFO", *(f"sb3_uatrpo.egg-info/{name}" for name in EGG_INFO)}
    assert names == PACKAGE | {f"{HOOK}.py"} | DOCUMENTS | BUILD | made
    assert built["wheel"].name == f"sb3_uatrpo-{__version__}-py3-none-any.whl"
    assert built["sdist"].name == f"sb3_uatrpo-{__version__}.tar.gz"
    assert max(path.stat().st_size for path in built.values()) < 150_000


def test_the_metadata_is_complete(metadata):
    for name, value in {
        "Name": "sb3_uatrpo",
        "Version": __version__,
        "License-Expression": "MIT",
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }.items():
        assert metadata[name] == value
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    extras = "mujoco train zoo maskable study ray onnx docs tests"
    assert metadata.get_all("Provides-Extra") == extras.split()
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.split(r"[<>=]", line)[0] for line in needed} == {"stable-baselines3", "torch", "gymnasium", "numpy"}
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_twine_accepts_both(built, tmp_path):
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.values(), cwd=tmp_path)
    assert said.count("PASSED") == 2


def test_continuous_integration_runs_on_the_versions_that_are_named(metadata):
    """Classifiers name what was tried, so the workflow runs on these and on the oldest that is allowed."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier")))
    assert named
    assert set(named) <= set(versions)
    assert metadata["Requires-Python"] == f">={versions[0]}"


def test_the_version_is_the_same_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    newest = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d|Unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == __version__


# ------------------------------------------------------------------------------------ links, as the release writes them

SCRIPT = ROOT / ".github" / "public_links.py"
REPOSITORY = "https://github.com/somebody/something"


@pytest.fixture
def released(tmp_path):
    """The README as a release writes it, and the URLs; ``code`` is 1 if it stops."""
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = something\n\n[options]\npackages = find:\n")

    def find(readme: str, code: int = 0) -> str:
        (tmp_path / "README.md").write_text(readme)
        said = run(sys.executable, SCRIPT, "somebody/something", "v1.0", cwd=tmp_path, code=code)
        return said if code else (tmp_path / "README.md").read_text()

    return find


def test_a_release_links_to_the_files_of_its_tag(released, tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("page.md", "picture.png", "film.gif"):
        (tmp_path / "docs" / name).touch()
    raw, blob = "https://raw.githubusercontent.com/somebody/something/v1.0", f"{REPOSITORY}/blob/v1.0"
    kept = "[elsewhere](https://example.org/docs) and [here](#part)"
    assert released(
        f"[a page](docs/page.md#part) and [a folder](docs), {kept}\n"
        "![a picture](docs/picture.png) [![both](docs/picture.png)](docs/page.md)\n![a film](docs/film.gif)\n"
    ) == (
        f"[a page]({blob}/docs/page.md#part) and [a folder]({blob}/docs), {kept}\n"
        f"![a picture]({raw}/docs/picture.png) [![both]({raw}/docs/picture.png)]({blob}/docs/page.md)\n"
        f"![a film]({raw}/docs/film.gif)\n"
    )
    settings = configparser.ConfigParser()
    settings.read(tmp_path / "setup.cfg")
    urls = dict(line.split(" = ") for line in settings["metadata"]["project_urls"].strip().splitlines())
    assert (urls["Source"], urls["Changelog"]) == (REPOSITORY, f"{blob}/CHANGELOG.md")
    assert settings["options"]["packages"] == "find:"


def test_no_link_of_this_readme_is_dead_or_stays_relative(released, tmp_path):
    for path in ROOT.iterdir():
        if path.name not in ("README.md", "setup.cfg"):
            (tmp_path / path.name).symlink_to(path)
    targets = re.findall(r"\]\(([^)]+)\)", released((ROOT / "README.md").read_text()))
    assert sum(target.startswith(REPOSITORY) for target in targets) > 10
    assert all(target.startswith(("https://", "#")) for target in targets)
    said = released("[gone](docs/gone.md)\n", code=1)
    assert said == "README.md links to docs/gone.md, which is not there\n"
