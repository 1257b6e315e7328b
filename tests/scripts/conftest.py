"""What tests of scripts and of snippets share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def world_of_one():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
