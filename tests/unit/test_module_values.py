"""What modules have come to keep in a discarded iteration goes; what they had comes back."""

import torch

from sparetrain_megatron.module_values import ModuleValues


class Table(torch.nn.Module):
    """Keeps a value in each of the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("known", torch.zeros(2), persistent=False)
        self.mask = None
        self.by_length: dict[int, torch.Tensor] = {1: torch.zeros(1)}
        self.activation = None
        self.count = 0

    def forward(self, length: int) -> None:
        self.mask = torch.ones(length)
        self.rotary = (torch.ones(length), torch.ones(length))
        self.by_length[length] = torch.ones(length)
        self.register_buffer("late", torch.ones(length), persistent=False)
        self.known = torch.ones(length)
        self.activation = self.weight * 2
        self.count += 1


def test_values_made_in_the_iteration_are_taken_away():
    model = torch.nn.Sequential(Table())
    table, known = model[0], model[0].known
    values = ModuleValues([model])
    table(3)
    values.restore()
    assert table.mask is None
    assert not hasattr(table, "rotary")
    assert list(table.by_length) == [1]
    assert not hasattr(table, "late")
    assert table.known is known
    assert table.weight is not None and list(dict(model.named_parameters())) == ["0.weight"]
    table(3)  # they can be made anew
    assert table.count == 2


def test_values_from_before_come_back():
    model = Table()
    model(3)
    mask, rotary = model.mask, model.rotary
    values = ModuleValues([model])
    model(5)
    assert model.mask is not mask
    values.restore()
    assert model.mask is mask and model.rotary is rotary
    assert sorted(model.by_length) == [1, 3]
    assert model.late.numel() == 3


def test_what_has_not_changed_stays():
    model = Table()
    model(3)
    before = dict(vars(model)), dict(model.by_length)
    ModuleValues([model]).restore()
    assert (dict(vars(model)), dict(model.by_length)) == before
