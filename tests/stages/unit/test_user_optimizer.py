"""A model in stages is trained with the user's optimizer, which stays usable."""

import pytest
import torch
from torch import nn

from roadtrain.errors import ConfigError
from roadtrain.stages.parallel_parts import UserOptimizer


def quiet(line):
    return None


def test_the_stages_read_a_loaded_state_dict():  # Rule 6
    model = nn.Linear(2, 2)
    user = torch.optim.SGD(model.parameters(), lr=0.1)
    read = user.param_groups
    UserOptimizer(model, user, quiet)
    state = user.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    user.load_state_dict(state)
    assert read[0]["lr"] == 0.5 and read[0]["params"] == [*model.parameters()]
    user.param_groups[0]["lr"] = 0.25  # as a scheduler would
    assert read[0]["lr"] == 0.25


def test_earlier_steps_of_the_optimizer_are_not_silently_dropped():  # Rule 6
    model = nn.Linear(2, 2)
    user = torch.optim.AdamW(model.parameters())
    fresh = torch.optim.AdamW(model.parameters())
    UserOptimizer(model, fresh, quiet)
    model(torch.ones(1, 2)).sum().backward()
    user.step()
    with pytest.raises(ConfigError, match="has already taken steps"):
        UserOptimizer(model, user, quiet)
    with pytest.raises(ConfigError, match="has already taken steps"):
        fresh.load_state_dict(user.state_dict())


def test_another_models_parameters_are_refused():  # Rule 6
    model, other, lines = nn.Linear(2, 2), nn.Linear(2, 2), []
    with pytest.raises(ConfigError, match="2 of the optimizer's 2 parameters are not in the model"):
        UserOptimizer(model, torch.optim.SGD(other.parameters(), lr=1.0), quiet)
    UserOptimizer(model, torch.optim.SGD([model.weight], lr=1.0), lines.append)
    assert "1 parameters are in no parameter group (the first is 'bias'" in lines[0]
