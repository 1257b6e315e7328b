"""Compiles what is not current, and says how far it is.

An object's name holds a hash of its command line and compiler; beside it lies a record of every file that was
read for it, from the compiler's own dependency file. An object is current if all of them hold what they held
then. So neither other flags nor another compiler find it, and a file that was only touched costs nothing.
"""

import fcntl
import hashlib
import json
import re
import shlex
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from build_tools import ROOT, BuildError
from build_tools.commands import OBJECTS


@contextmanager
def locked():
    """Two builds of one checkout at a time would write the same files."""
    folder = ROOT / OBJECTS
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def version_of(path):
    """[mtime in ns, size] of a file, None if there is none."""
    try:
        status = (ROOT / path).stat()
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


@cache
def digest(path, mtime_ns, size):
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def record_of(files):
    """{path: [mtime in ns, size, hash of the content]}."""
    versions = {str(path): version_of(path) for path in files}
    return {path: [*version, digest(path, *version)] for path, version in versions.items()}


def is_unchanged(path, recorded, version):
    return version is not None and (version == recorded[:2] or digest(path, *version) == recorded[2])


def read_record(path):
    try:
        return json.loads((ROOT / path).read_text())
    except (OSError, ValueError):
        return None


def dependencies_in(text):
    """The files that a rule for make names behind its colon."""
    _, _, files = text.replace("\\\n", " ").partition(": ")
    return [re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|\S)+", files)]


def record_path(job):
    return job.object.with_suffix(".json")


def find_current(jobs):
    """{job: record} of the jobs whose objects are there and current."""
    versions = cache(version_of)  # most files are named by many records
    found = {}
    for job in jobs:
        record = read_record(record_path(job))
        if record is None or versions(job.object) is None:
            continue
        if all(is_unchanged(path, recorded, versions(path)) for path, recorded in record.items()):
            found[job] = record
    return found


def fingerprint(job, record):
    """Of all that an object depends on."""
    return [job.key, *(recorded[2] for _, recorded in sorted(record.items()))]


class Progress:
    """A line per finished object, with the compiler's warnings below it."""

    def __init__(self, total):
        self.total, self.done, self.lock = total, 0, threading.Lock()

    def finished(self, job, seconds, said):
        with self.lock:
            self.done += 1
            print(f"[{self.done}/{self.total}] {job.label} {seconds:.1f} s", flush=True)
            if said:
                print(said, flush=True)


def compile_one(job, progress):
    """Compiles and records what was read."""
    target, record = ROOT / job.object, ROOT / record_path(job)
    target.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    dependencies = target.with_suffix(".d")
    command = job.command(job.object, dependencies.relative_to(ROOT))
    began, clock = time.time_ns(), time.monotonic()
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise BuildError(f"{job.label} did not compile:\n{shlex.join(command)}\n{run.stdout.strip()}")
    files = record_of(dependencies_in(dependencies.read_text()))
    dependencies.unlink()
    # A file written meanwhile may not be what the compiler read: without a record this is compiled again.
    if all(mtime_ns <= began for mtime_ns, _, _ in files.values()):
        record.write_text(json.dumps(files))
    progress.finished(job, time.monotonic() - clock, run.stdout.strip())
    return files


def longest_first(jobs):
    return sorted(jobs, key=lambda job: (-job.seconds, job.label))


def compile_all(jobs, processes, before, beside=()):
    """Brings all objects up to date and returns their fingerprints; calls `before` if any is not.

    beside: jobs of another extension, so that no core waits for the last object of this one. An error of
    theirs is raised where they are compiled for themselves.
    """
    records = find_current([*jobs, *beside])
    stale = longest_first(job for job in [*jobs, *beside] if job not in records)
    if stale:
        before()
        total = len(jobs) + len(beside)
        print(f"{len(stale)} of {total} objects to compile, {processes} at a time", flush=True)
        records |= compile_stale(stale, processes, beside)
    return [fingerprint(job, records[job]) for job in jobs]


def compile_stale(stale, processes, beside=()):
    progress = Progress(len(stale))
    with ThreadPoolExecutor(processes) as pool:
        running = {job: pool.submit(compile_one, job, progress) for job in stale}
        try:
            done = [job for job, future in running.items() if not (future.exception() and job in beside)]
            return {job: running[job].result() for job in done}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def link(command, objects, fingerprints, target):
    """Links, unless the library is what an earlier link of the same objects left there."""
    target = Path(target).absolute()
    key = hashlib.sha256(json.dumps([command, fingerprints]).encode()).hexdigest()
    name = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    record = ROOT / OBJECTS / f"{target.name}.{name}.json"
    if target.exists() and read_record(record) == [key, version_of(target)]:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = [*command, *map(str, objects), "-o", str(target)]
    run = subprocess.run(whole, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise BuildError(f"{target.name} was not linked:\n{shlex.join(whole)}\n{run.stdout.strip()}")
    record.write_text(json.dumps([key, version_of(target)]))
    print(f"linked {target.name}, {target.stat().st_size / 1e6:.1f} MB", flush=True)
