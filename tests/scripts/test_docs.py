"""What README.md and docs/ show is what is in the repository, and the site builds.

test_docs_snippets.py runs the blocks of Python, test_docs_commands.py parses the commands, and
test_docs_figures.py compares figures.
"""

import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases.docs import PAGES, ROOT, blocks
from early import waits_for

import zerofp4
from benchmarks import output, pages, pictures

DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text()
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


@pytest.mark.parametrize("language", ["python", "text"])
def test_the_first_program_and_its_output_are_those_of_the_readme(language):
    readme, page = (blocks(page, language)[0].code for page in (ROOT / "README.md", DOCS / "index.md"))
    assert readme == page


MOST_WORDS = 25
"""In a cell of a table."""


def cells(page: Path) -> Iterator[str]:
    """The text of each cell of a page's tables. A link counts as its text."""
    for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines():
        if line.startswith("|"):
            text = re.sub(r"\]\([^)]*\)", "]", line.strip().strip("|"))
            yield from re.split(r"(?<!\\)\|", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_are_short(page):
    assert [cell for cell in cells(page) if len(cell.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", pages.SECTIONS)
def test_the_tables_are_those_of_the_result_files(page):
    if page == "large-models.md":
        pytest.importorskip("transformers")
    shown = (DOCS / page).read_text().split(output.BEGIN)[1].split(output.END)[0]
    assert shown == pages.SECTIONS[page](), "run python -m benchmarks docs"


def test_the_page_about_performance_is_short():
    assert len((DOCS / "performance.md").read_text().split()) <= 2500


def test_the_api_page_has_every_public_name():
    listed = set(re.findall(r"^::: zerofp4\.(\S+)$", API, re.MULTILINE))
    public = {name for name in zerofp4.__all__ if name not in ROOMS}
    # There mkdocstrings would show the folder of that name, of which the package's attribute is the function.
    public = {"gemm.gemm" if name == "gemm" else name for name in public}
    for room in ("optim", "nn", "serving"):
        names = getattr(zerofp4, room).__all__
        public |= {f"{room}.{name}" for name in names if name not in zerofp4.__all__}
    public |= {f"launch.{name}" for name in ("World", "init_process_group", "destroy_process_group")}
    assert public <= listed, f"not on docs/api.md: {sorted(public - listed)}"


# The table of all options has each parameter of each public function and method, once

NOT_CALLED_BY_USERS = {
    "zerofp4.GroupedNVFP4",
    "zerofp4.MXFP8Tensor",
    "zerofp4.NVFP4Tensor",
    "zerofp4.inspect.QuantizationReport",
    "zerofp4.integrations.fsdp2.Attachment",
    "zerofp4.launch.World",
    "zerofp4.nn.ConversionReport",
    "zerofp4.nn.Conv1D",
    "zerofp4.nn.Experts",
    "zerofp4.nn.FilterFn",
    "zerofp4.serving.ExportReport",
    "zerofp4.serving.FUSED",
    "zerofp4.serving.LoadReport",
    "zerofp4.serving.Part",
    "zerofp4.serving.Served",
    "zerofp4.serving.ServedWeights",
    "zerofp4.tensors.quantized_tensor.QuantizedTensor",
    "zerofp4.testing.VerificationError",
}
"""What functions return or raise, and a type of functions: their methods count, their constructors do not."""

IN_ROOM = re.compile(r"zerofp4\.(nn\.|optim\.|serving\.|gemm\.|launch\.|inspect\.|testing\.|integrations\.)?")
SHADOWED = re.compile(r"\b(\w+)\.\1\b")
"""A function in a module of its own name."""


def public_callables() -> Iterator[tuple[str, inspect.Signature]]:
    """In the order of the page: the name that the table uses, and the signature."""
    for path, options in re.findall(r"^::: (\S+)\n((?: .+\n)*)", API, re.MULTILINE):
        found, name = pkgutil.resolve_name(path), SHADOWED.sub(r"\1", IN_ROOM.sub("", path))
        assert not inspect.ismodule(found), f"{path} is a module, whose function of that name is meant"
        if path not in NOT_CALLED_BY_USERS:
            yield name, inspect.signature(found)
        members = re.search(r"members: (.*)", options)
        for method in public_methods(found):
            if members is None or method in re.findall(r"\w+", members[1]):
                yield f"{name}.{method}", inspect.signature(getattr(found, method))


def public_methods(found: object) -> list[str]:
    """Of a class, those that it and its bases in this package define."""
    bases = [base for base in getattr(found, "__mro__", ()) if base.__module__.startswith("zerofp4")]
    methods = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return [name for name, value in methods.items() if inspect.isfunction(value) and name[0] != "_"]


def test_the_table_has_each_option_of_each_public_callable_once():
    taken: dict[str, list[str]] = {}
    for name, signature in public_callables():
        for option in signature.parameters:
            if option != "self":
                taken.setdefault(option, []).append(f"`{name}`")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", API.split("## All options")[1], re.MULTILINE)
    options = [option for option, _, _ in rows]
    assert options == sorted(taken, key=str.lower)
    for option, _, callables in rows:
        assert callables == ", ".join(taken[option]), f"docs/api.md: who takes {option}"


# The first pages are short, and what README.md says is so

README = (ROOT / "README.md").read_text()
MOST_LINES = {"README.md": 110, "docs/index.md": 150}
FIRST_SCREEN = 40
"""Lines."""


@pytest.mark.parametrize("page", MOST_LINES)
def test_the_page_is_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= MOST_LINES[page]


def test_the_first_screen_has_the_way_in_and_no_figure():
    screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
    for said in ("What it does not do", "pip install", "python train.py", "torchrun", "convert_model(model)"):
        assert said in screen, f"{said} is not among the first {FIRST_SCREEN} lines"
    for page in ("index", "install", "large-models", "step"):
        assert f"](docs/{page}.md)" in screen, f"docs/{page}.md is not among the first {FIRST_SCREEN} lines"
    assert not re.search(r"\d (?:ms|GB|tokens)\b", screen)


def test_the_table_of_bytes_per_parameter():
    assert f"]({pictures.MEMORY.relative_to(DOCS)})" in (DOCS / "index.md").read_text()
    assert pictures.MEMORY.exists()
    pytest.importorskip("transformers")
    rows = re.findall(r"^\|.*\|$", README.split("## Bytes per parameter")[1].split("\n## ")[0], re.MULTILINE)
    for way, row in zip(pictures.NAMES, rows[2:], strict=True):
        kept = pictures.kept(way)
        parts = [f"{kept[part]:.1f}" if part in kept else "host" for part in list(pictures.COLORS)[:4]]
        shared = sum(pictures.kept(way, 8).values())
        several = "" if way in (pages.EARLY, pages.OFFLOADED) else f"{shared:.1f}"
        assert [cell.strip() for cell in row.split("|")[2:-1]] == [
            *parts,
            f"{sum(kept.values()):.1f}",
            several,
        ]


def test_the_bars_of_one_gpu_end_at_the_peak_of_the_run():
    pytest.importorskip("transformers")
    run, bars = pages.runs()[0], pictures.bars(1)
    early = bars[pictures.NAMES[pages.EARLY]]
    assert sum(early.values()) == pytest.approx(run.peak / run.parameters)
    assert set(early) == set(pictures.COLORS) and min(early.values()) > 0
    flash = [sum(parts.values()) - pages.beyond(run) for name, parts in bars.items() if "its paper" in name]
    assert flash == pytest.approx(list(pages.FLASH.values()))


def test_both_commands_end_as_it_says():
    for script, word in (("demo.sh", "DEMO"), ("test.sh", "TESTS")):
        text = (ROOT / "scripts" / script).read_text()
        assert f"\nverdict {word}\n" in text and text.endswith("passed\n"), script
        for end in (f"{word} PASSED", f"{word} FAILED"):
            assert end in README, f"{end} is not in README.md"
    verdict = (ROOT / "scripts" / "verdict.sh").read_text()
    assert '"$VERDICT PASSED"' in verdict and '"$VERDICT FAILED"' in verdict


# The site


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
