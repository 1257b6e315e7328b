"""What torchrun and mpirun leave in the environment, and the device of a rank."""

import pytest
import torch

from zerofp4.launch.place import Place, choose_device, mpirun_size, place_from_environment, ranks_started


def test_place_under_torchrun():
    env = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert place_from_environment(env) == Place(6, 8, 2, 4)
    del env["LOCAL_WORLD_SIZE"]
    assert place_from_environment(env) == Place(6, 8, 2, 3)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, 3),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMIX_RANK": "0"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
    ],
)
def test_mpirun_is_recognized(environment, size):
    assert mpirun_size(environment) == size
    assert ranks_started(environment) == (size or 1)


def test_ranks_started_by_torchrun():
    assert ranks_started({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}) == 8
    assert ranks_started({"RANK": "0", "WORLD_SIZE": "2"}) == 2
    assert ranks_started({"WORLD_SIZE": "8"}) == 8


def test_each_local_rank_has_a_gpu_of_its_own(two_gpus):
    assert choose_device(None, Place(5, 8, 1, 2)) == ("nccl", torch.device("cuda", 1))
    assert choose_device("cpu:gloo,cuda:nccl", Place(0, 1, 0, 1))[1].index == 0
    assert choose_device("gloo", Place(5, 8, 1, 2)) == ("gloo", torch.device("cpu"))
