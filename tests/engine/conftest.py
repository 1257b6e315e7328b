"""What tests of the places of gradients share."""

import pytest
from cases.gradient_places import Twice, made

from zerofp4.tensors import GradientPlace


@pytest.fixture
def models(device):
    return made(Twice(bias=False), device)


@pytest.fixture
def given(monkeypatch):
    """Whether each product that asked was given the place."""
    found = []
    give = GradientPlace.give

    def spy(place, *arguments):
        memory = give(place, *arguments)
        found.append(memory is not None)
        return memory

    monkeypatch.setattr(GradientPlace, "give", spy)
    return found
