"""The text of the fidelity benchmark: Debian's packages of documentation and of sources, as uint16 tokens.

    apt-get download $(python -m benchmarks.text --packages)
    python -m benchmarks.text DIRECTORY_OF_DEBS .dev/tokens

Needs the package `tokenizers` and dpkg-deb. --packages names the versions that published losses were measured
on; for one that Debian no longer has, take the present one, and measure all losses again. Markup is stripped,
lines that repeat are dropped, documents are shuffled. Three packages and a fiftieth of other documents are
held out. tokens.json has the versions and digests of the packages, and the digests of the tokens; tokens-*.xz
have the tokens of all parts, one after the other.
"""

import argparse
import gzip
import hashlib
import html
import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

PACKAGES = {
    "dict-gcide": "**/*.dict.dz",
    "dict-wn": "**/*.dict.dz",
    "dict-foldoc": "**/*.dict.dz",
    "perl-doc": "**/*.pod",
    "python3.11-doc": "**/_sources/**/*.txt",
    "linux-doc-6.1": "**/Documentation/**/*.gz",
    "rust-doc": "**/*.html",
    "erlang-doc": "**/*.html",
    "openjdk-17-doc": "**/*.html",
    "postgresql-doc-15": "**/*.html",
    "cppreference-doc-en-html": "**/*.html",
    "qtbase5-doc-html": "**/*.html",
    "libboost1.81-doc": "**/*.html",
    "sqlite3-doc": "**/*.html",
    "llvm-14-doc": "**/*.html",
    "octave-doc": "**/*.html",
    "debian-handbook": "**/en-US/*.html",
    "python-pandas-doc": "**/*.html",
    "python-scipy-doc": "**/*.html",
    "python-sympy-doc": "**/*.html",
    "python-sklearn-doc": "**/*.html",
    "python-astropy-doc": "**/*.html",
    "python-statsmodels-doc": "**/*.html",
    "sagemath-doc": "**/*.html",
    "racket-doc": "**/*.html",
    "scala-doc": "**/*.html",
    "ghc-doc": "**/*.html",
    "wx3.2-doc": "**/*.html",
    "derby-doc": "**/*.html",
    "gnuradio-doc": "**/*.html",
    "twisted-doc": "**/*.html",
    "lazarus-doc-2.2": "**/*.html",
    "petsc3.18-doc": "**/*.html",
    "opencv-doc": "**/*.html",
    "pike8.0-doc": "**/*.html",
    "groovy-doc": "**/*.html",
    "libapache-poi-java-doc": "**/*.html",
    "libgtkmm-3.0-doc": "**/*.html",
    "libreoffice-help-en-us": "**/*.html",
    "emacs-el": "**/*.el.gz",
    "golang-1.19-src": "**/*.go",
    "rust-src": "**/*.rs",
    "libboost1.81-dev": "**/*.hpp",
    "acl2-books-source": "**/*.lisp",
    "perl-modules-5.36": "**/*.pm",
    "libpython3.11-stdlib": "**/*.py",
    "python3-sympy": "**/*.py",
    "linux-source-6.1": "**/*.tar.xz",
}
"""By package of Debian 12, its documents, or an archive of them."""
IN_ARCHIVES = re.compile(r"[^/]+/(?!arch/|drivers/|sound/|tools/).*\.c")
"""Which files of an archive are documents."""
HELD_OUT = ("dict-foldoc", "postgresql-doc-15", "debian-handbook")
SOURCES = "/html/src/"  # of rust-doc
VOCABULARY, END = 32_000, "<|end|>"
LEAST_CHARACTERS = 200
"""Of a document, after lines that repeat are gone."""
DICTIONARY_LINES = 100
"""How many lines of a dictionary are a document, at least."""
ONCE, SHORT_TIMES = 24, 1_000
"""Lines of as many characters are kept once, shorter ones so often."""
EVERY = 50
"""One in so many documents is held out."""
SEED = 20_260
MOST_TRAINED_ON = 80_000_000
"""Characters that the tokenizer is trained on: the first documents."""
PIECE = 64_000_000
"""Tokens of a file."""
PARTS = ("train", "documents", "packages")
"""Of the tokens: for training; held-out documents; held-out packages."""

PUBLISHED = Path(__file__).parent / "results" / "fidelity" / "tokens.json"
"""Of the text of published losses."""

HIDDEN = re.compile(r"<(script|style|head|nav|noscript|svg)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I)
BREAKS = re.compile(r"<(?:br|/?(?:p|div|li|tr|h\d|pre|section|dt|dd|table|ul|ol|summary))\b[^>]*>", re.I)
CELLS = re.compile(r"</t[dh]\s*>", re.I)
TAGS = re.compile(r"<[^>]*>")
BLANK_LINES = re.compile(r"\n\s*\n\s*")


def plain(page: str) -> str:
    """The text of an HTML page."""
    page = BREAKS.sub("\n", HIDDEN.sub(" ", page))
    return html.unescape(TAGS.sub("", CELLS.sub(" ", page)))


def unpacked(package: str, deb: Path) -> list[str]:
    """The documents of a package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
        return list(documents(package, Path(folder)))


def documents(package: str, folder: Path) -> Iterator[str]:
    """The documents of an unpacked package, in the order of their paths."""
    for path in sorted(folder.glob(PACKAGES[package])):
        if not path.is_file() or path.is_symlink() or SOURCES in str(path):
            continue
        if path.suffix == ".xz":
            yield from archived(path)
            continue
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix in (".gz", ".dz") else content
        text = content.decode("utf-8", "replace")
        if path.suffix == ".dz":
            yield from entries(text)
        else:
            yield plain(text) if path.suffix == ".html" else text


def archived(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and IN_ARCHIVES.fullmatch(member.name):
                yield archive.extractfile(member).read().decode("utf-8", "replace")


def entries(dictionary: str) -> Iterator[str]:
    """Runs of a dictionary's entries, whose first lines are not indented."""
    lines: list[str] = []
    for line in dictionary.splitlines():
        if len(lines) >= DICTIONARY_LINES and line[:1].strip():
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def without_repeats(document: str, seen: Counter[str]) -> str:
    kept = []
    for line in document.expandtabs(4).splitlines():
        line = line.rstrip()
        words = line.strip()
        if words:
            seen[words] += 1
            if seen[words] > (1 if len(words) >= ONCE else SHORT_TIMES):
                continue
        kept.append(line)
    return BLANK_LINES.sub("\n\n", "\n".join(kept)).strip()


def read(debs: Path) -> tuple[dict[str, list[str]], list[dict]]:
    """Documents by part, shuffled, and what is recorded of the packages."""
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    records, seen = [], Counter[str]()
    packages = sorted(PACKAGES, key=lambda name: name in HELD_OUT)
    archives = [next(debs.glob(f"{package}_*.deb")) for package in packages]
    with ProcessPoolExecutor(1) as pool:  # unpacks the next package meanwhile
        unpacking = pool.map(unpacked, packages, archives)
        for package, deb, texts in zip(packages, archives, unpacking, strict=True):
            version = subprocess.check_output(["dpkg-deb", "-f", deb, "Version"], text=True).strip()
            cleaned = (without_repeats(text, seen) for text in texts)
            kept = [text for text in cleaned if len(text) >= LEAST_CHARACTERS]
            digest = hashlib.sha256(deb.read_bytes()).hexdigest()
            record = {"package": package, "version": version, "sha256": digest}
            records.append(record | {"documents": len(kept), "characters": sum(map(len, kept))})
            print(records[-1], flush=True)
            if package in HELD_OUT:
                found["packages"] += kept
            else:
                for i, text in enumerate(kept):
                    found["documents" if i % EVERY == EVERY - 1 else "train"].append(text)
    for texts in found.values():
        random.Random(SEED).shuffle(texts)
    return found, records


def train_tokenizer(texts: list[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = {"vocab_size": VOCABULARY, "special_tokens": [END], "initial_alphabet": alphabet}
    total, count = 0, 0
    while count < len(texts) and total < MOST_TRAINED_ON:
        total, count = total + len(texts[count]), count + 1
    tokenizer.train_from_iterator(texts[:count], trainers.BpeTrainer(show_progress=False, **own))
    return tokenizer


def pack(tokens: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 27}]
    return lzma.compress(tokens, filters=filters)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text")
    parser.add_argument("--packages", action="store_true", help="print the packages, as apt-get takes them")
    parser.add_argument("debs", type=Path, nargs="?", help="folder of the downloaded packages")
    parser.add_argument("output", type=Path, nargs="?", help="folder for tokens-*.xz and tokens.json")
    parser.add_argument("--most", type=int, help="tokens to train on, the first of the shuffled documents")
    options = parser.parse_args()
    published = json.loads(PUBLISHED.read_text())
    if options.packages:
        versions = {record["package"]: record["version"] for record in published["packages"]}
        print(*(f"{package}={versions[package]}" for package in PACKAGES))
        return
    found, records = read(options.debs)
    tokenizer = train_tokenizer(found["train"])
    end, parts, total = tokenizer.token_to_id(END), {}, array("H")
    for part, texts in found.items():
        tokens = array("H")
        for i in range(0, len(texts), 1_000):
            for encoding in tokenizer.encode_batch(texts[i : i + 1_000]):
                tokens.extend(encoding.ids)
                tokens.append(end)
        if part == "train" and options.most:
            del tokens[options.most :]
        parts[part] = {"tokens": len(tokens), "sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}
        parts[part] |= {"documents": len(texts), "characters": sum(map(len, texts))}
        print(part, parts[part], flush=True)
        total.extend(tokens)
    if sys.byteorder != "little":
        total.byteswap()
    options.output.mkdir(parents=True, exist_ok=True)
    pieces = [total[begin : begin + PIECE].tobytes() for begin in range(0, len(total), PIECE)]
    with ThreadPoolExecutor() as pool:
        for n, packed in enumerate(pool.map(pack, pieces)):
            (options.output / f"tokens-{n:02}.xz").write_bytes(packed)
            print(f"wrote {options.output / f'tokens-{n:02}.xz'}: {len(packed) / 1e6:.1f} MB", flush=True)
    vocabulary = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    about = {"packages": records, "tokenizer": {"sha256": vocabulary}, "parts": parts}
    (options.output / "tokens.json").write_text(json.dumps(about, indent=1) + "\n")
    print("the text of published losses" if parts == published["parts"] else "another text than published")


if __name__ == "__main__":
    main()
