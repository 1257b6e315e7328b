"""What torchrun and mpirun leave in the environment, and the device of a rank."""

import pytest
import torch

from zerofp4.launch import Place, choose_device, find_place, ranks_started


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
        {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
        {
            "OMPI_COMM_WORLD_RANK": "6",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
    ],
)
def test_a_place_by_the_variables_of_each_launcher(env):
    assert ranks_started(env) == 8 and find_place(env) == Place(6, 8, 2, 4)
    del env[list(env)[-1]]
    assert find_place(env) == Place(6, 8, 2, 3)


@pytest.mark.parametrize(
    ("environment", "started"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8"}, 1),  # as a cluster may set it in a shell
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMIX_RANK": "0"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
    ],
)
def test_ranks_started(environment, started):
    assert ranks_started(environment) == started


def test_a_variable_that_is_no_number():
    with pytest.raises(ValueError, match="PMI_SIZE: must be a whole number, got 'two'"):
        ranks_started({"PMI_RANK": "0", "PMI_SIZE": "two"})


def test_each_local_rank_has_a_gpu_of_its_own(two_gpus):
    assert choose_device(None, Place(5, 8, 1, 2)) == ("nccl", torch.device("cuda", 1))
    assert choose_device("cpu:gloo,cuda:nccl", Place(0, 1, 0, 1))[1].index == 0
    assert choose_device("gloo", Place(5, 8, 1, 2)) == ("gloo", torch.device("cpu"))
