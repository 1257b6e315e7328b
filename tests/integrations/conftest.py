"""What tests of integrations share as fixtures."""

import pytest
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture
def mesh(world_of_one) -> DeviceMesh:
    """A mesh of this process alone."""
    return DeviceMesh("cpu", [0], mesh_dim_names=("shard",))
