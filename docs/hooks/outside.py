"""A hook of mkdocs: what lies outside docs/ and belongs on the site, with links that work there as they do in
the repository.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = ("CHANGELOG.md", "benchmarks/NOTES.md", "benchmarks/results/*.png")
"""Files of the repository, each at its path there."""


def on_files(files: Files, config) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """`../benchmarks/NOTES.md` in docs/ is `benchmarks/NOTES.md` on the site."""

    def inward(match: re.Match) -> str:
        target = match[1].partition("#")[0]
        return match[0] if files.get_file_from_path(target) is None else f"]({match[1]})"

    return re.sub(r"\]\(\.\./([^)]+)\)", inward, markdown)
