"""
Give README.md and setup.cfg of the current folder the addresses of a release, which PyPI needs.

    python .github/public_links.py OWNER/NAME TAG

On GitHub a relative link is right on every branch and in every fork; on PyPI it leads nowhere. The release workflow,
which knows the repository and the tag, changes both files before it builds. The result is not committed.
"""

import re
import sys
from pathlib import Path

PICTURES = (".gif", ".png", ".svg")


def main(repository: str, tag: str) -> None:
    pages = f"https://github.com/{repository}/blob/{tag}"
    pictures = f"https://raw.githubusercontent.com/{repository}/{tag}"

    def absolute(link: re.Match[str]) -> str:
        target = link[1]
        path = Path(target.partition("#")[0])
        if not path.exists():
            sys.exit(f"README.md links to {target}, which is not there")
        return f"]({pictures if path.suffix in PICTURES else pages}/{target})"

    readme = Path("README.md")
    # neither https: and the like nor a place on the same page
    readme.write_text(re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", absolute, readme.read_text()))

    urls = {
        "Source": f"https://github.com/{repository}",
        "Documentation": f"{pages}/docs",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"https://github.com/{repository}/issues",
    }
    lines = "".join(f"    {name} = {url}\n" for name, url in urls.items())
    settings = Path("setup.cfg")
    settings.write_text(settings.read_text().replace("[metadata]\n", f"[metadata]\nproject_urls =\n{lines}", 1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
