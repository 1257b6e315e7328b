"""What docs/ shows is what is in the repository, and the site builds.

test_docs_snippets.py runs the blocks of Python, test_docs_commands.py parses the commands, and
test_docs_figures.py compares figures.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases.docs import PAGES, ROOT, blocks
from early import waits_for

import zerofp4
from benchmarks import output, pages

DOCS = ROOT / "docs"
ROOMS = ("launch", "nn", "optim", "serving", "__version__")
"""Of the package's names those whose own names are on the page, or are none of an API."""


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """Of headings, as mkdocs and GitHub make them of what ours consist of."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name}: {target} has no such heading"


def test_the_first_snippet_of_own_step_is_the_example():
    example = (ROOT / "examples" / "own_optimizer_step.py").read_text()
    assert example.endswith(f'"""\n\n{blocks(DOCS / "own-step.md", "python")[0].code}')


def test_the_training_snippet_is_that_of_the_readme():
    readme, page = (
        blocks(page, "python")[0].code.splitlines() for page in (ROOT / "README.md", DOCS / "index.md")
    )
    assert readme == page


@pytest.mark.parametrize("page", pages.SECTIONS)
def test_the_tables_are_those_of_the_result_files(page):
    if page == "large-models.md":
        pytest.importorskip("transformers")
    shown = (DOCS / page).read_text().split(output.BEGIN)[1].split(output.END)[0]
    assert shown == pages.SECTIONS[page](), "run python -m benchmarks docs"


def test_the_page_about_performance_is_short():
    assert len((DOCS / "performance.md").read_text().split()) <= 2500


def test_the_api_page_has_every_public_name():
    listed = set(re.findall(r"^::: zerofp4\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    public = {name for name in zerofp4.__all__ if name not in ROOMS}
    # There mkdocstrings would show the folder of that name, of which the package's attribute is the function.
    public = {"gemm.gemm" if name == "gemm" else name for name in public}
    for room in ("optim", "nn", "serving"):
        names = getattr(zerofp4, room).__all__
        public |= {f"{room}.{name}" for name in names if name not in zerofp4.__all__}
    public |= {f"launch.{name}" for name in ("World", "init_process_group", "destroy_process_group")}
    assert public <= listed, f"not on docs/api.md: {sorted(public - listed)}"


def why_not() -> str | None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install mkdocs-material mkdocstrings-python ruff"
    return None


def run_docs(script: Path, path: str, *options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": path}
    return subprocess.run([script, *options], env=environment, capture_output=True, text=True, timeout=300)


def build_site(folder: Path) -> tuple[subprocess.CompletedProcess, Path]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return run_docs(ROOT / "scripts" / "docs.sh", path, "--site-dir", str(folder)), folder


@pytest.mark.heavy
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@waits_for(build_site)
def test_the_site_builds_without_a_warning(early):
    built, site = early(build_site)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.endswith("DOCS BUILT\n")
    assert (site / "benchmarks" / "NOTES.html").exists()
    api = (site / "api.html").read_text()
    assert "<li>" in api and "<code>on_nonfinite</code>: " in api
    assert (site / "search" / "search_index.js").exists(), "a page in a folder loads the index as a script"
    loaded = re.findall(r'<(?:script|link)[^>]* (?:src|href)="(https?://[^"]+)"', api)
    assert not loaded, f"the site needs a network for {loaded}"


def test_without_mkdocs_the_script_says_what_is_missing(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = Path(shutil.copy(ROOT / "scripts" / "docs.sh", tmp_path / "scripts"))
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    run = run_docs(script, os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert run.returncode == 1
    assert run.stderr == (
        "error: the documentation needs mkdocs: pip install mkdocs-material mkdocstrings-python ruff\n"
    )


DOCSTRING = """\
weights: one tensor
or several.
weights[i], scales: of the
i-th layer.
Note: this is no parameter.
Raises ValueError for none."""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_explained_names_become_a_list():
    from docs.hooks.docstrings import with_list

    assert with_list(DOCSTRING, {"weights", "scales"}) == (
        "- `weights`: one tensor or several.\n"
        "- `weights[i], scales`: of the i-th layer. Note: this is no parameter.\n\n"
        "Raises ValueError for none."
    )
    sentence = "A sentence: nothing of it\nis a list."
    assert with_list(sentence, {"A"}) == sentence
