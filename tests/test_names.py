"""What is an attribute of the package, and what an import of it does not import."""

import subprocess
import sys

import pytest

import zerofp4

PROGRAM = """
import sys
import zerofp4
assert not {"zerofp4.integrations", "zerofp4.testing"} & sys.modules.keys()
zerofp4.testing.assert_bytes_equal
for name in ("fsdp2", "megatron", "torchtitan", "transformer_engine"):
    getattr(zerofp4.integrations, name)
assert not {"megatron", "torchtitan", "transformer_engine", "transformers"} & sys.modules.keys()
"""


@pytest.mark.heavy
def test_integrations_and_testing_are_reachable_and_imported_late():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.parametrize("package", [zerofp4, zerofp4.integrations])
def test_other_names_are_no_attributes(package):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
