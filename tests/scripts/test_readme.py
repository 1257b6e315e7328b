"""What README.md shows is what is in the repository."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_snippet_is_the_example_and_runs():
    example = (ROOT / "examples" / "own_optimizer_step.py").read_text()
    shown = re.search(r"```python\n(import torch.*?)```", README, re.DOTALL).group(1)
    assert example.endswith(shown), "README.md shows another snippet than examples/own_optimizer_step.py"
    command = [sys.executable, "examples/own_optimizer_step.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "linear gives (4, 256) torch.bfloat16" in run.stdout


def test_the_tables_are_those_of_the_result_files():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "scripts" / "bench.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    shown = README.split("<!-- benchmarks: begin -->\n")[1].split("\n<!-- benchmarks: end -->")[0]
    assert shown == bench.readme_section(), "run scripts/bench.py readme"
