"""The documentation site: `make docs` builds it."""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# this tree's package is described, not one that is installed
sys.path.insert(0, str(ROOT))

from sb3_uatrpo import __version__  # noqa: E402

project = "sb3_uatrpo"
version = release = __version__
html_title = f"{project} {release}"
html_show_copyright = False

# Model cards, for who reads the repository
exclude_patterns = ["agents"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
# headings down to ### have anchors, named as Git hosting sites name them
myst_heading_anchors = 3

html_theme = "sphinx_rtd_theme"
html_static_path = ["_static"]
html_css_files = ["layout.css"]
# Markdown sources are in the repository
html_copy_source = False
html_show_sourcelink = False

# J'HJ is a product, and no quotation
smartquotes = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
# 6e-4 and 2**30 as the signatures have them
autodoc_preserve_defaults = True

# Every reference within this package has to resolve; those to other packages would need their inventories from the
# network, and variables for the type of self have no page.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!sb3_uatrpo).*"), ("py:.*", r"sb3_uatrpo\..*\.Self\w+")]

# Pages that include files of the repository's root
INCLUDED = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
}
# [label](target), where the target is neither an address nor an anchor of the same page
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#)([^()\s]+)\)")


def mend_links(text: str, start: Path, page: Path) -> str:
    """
    Links are written for whoever reads the files in the repository. Here those to pages lead to pages and those to
    other files to copies of them; a folder has neither, and Markdown that is no page would lack its pictures and links,
    so these keep their names alone.

    :param text: Markdown
    :param start: the folder that its links start from
    :param page: the folder of the page that it becomes part of
    :return: the same with links that start from the page's folder, and none to folders or other Markdown
    """

    def mended(link: re.Match[str]) -> str:
        label, target = link.groups()
        path, *anchor = target.split("#")
        file = (start / path).resolve()
        if file in INCLUDED:
            file = DOCS / INCLUDED[file]
        if file.is_dir() or (file.suffix == ".md" and not file.is_relative_to(DOCS)):
            return label
        return f"[{label}]({'#'.join([os.path.relpath(file, page), *anchor])})"

    return LINK.sub(mended, text)


def setup(app):
    def page_read(app, docname, source):
        folder = (DOCS / docname).parent
        source[0] = mend_links(source[0], folder, folder)

    def included(app, path, docname, source):
        # files of the root, by pages of this folder
        source[0] = mend_links(source[0], (DOCS / path).resolve().parent, DOCS)

    app.connect("source-read", page_read)
    app.connect("include-read", included)
