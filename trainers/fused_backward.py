"""Optimizers made of others: several as one, and one that updates each weight inside the backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from models.adapters import AdapterError, own_name


class Joined(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters as one: their groups in a row, one state, one state dict.

    Raises ValueError where two of them hold the same parameter.
    """

    def __init__(self, *parts: torch.optim.Optimizer):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Gives the parts this optimizer's groups and state, which are theirs from then on."""
        groups = iter(self.param_groups)
        for part in self.parts:
            own = [next(groups) for _ in part.param_groups]
            part.__setstate__({"state": self.state, "param_groups": own})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable | None = None) -> None:
        for part in self.parts:
            part.step(closure)


class FusedBackward(torch.optim.Optimizer):
    """Has `optimizer` update each parameter as soon as its gradient is complete, and frees that gradient at once.

    So no more than a few gradients exist at a time. Groups, state and state dict are those of `optimizer`: a checkpoint
    does not tell the two apart. Weights are bit-equal to those of `optimizer.step()` after the backward pass, unless
    the update draws random numbers (stochastic rounding), which come in another order. For one backward pass per step
    and optimizers whose update of a tensor depends on that tensor alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, Parameter]):
        self.optimizer, self.parameters = optimizer, parameters
        self.norms: dict[Parameter, Tensor] = {}  # of this backward pass, on the device
        self.advanced: dict[tuple[int, int], dict[str, Any]] = {}  # groups as its updates left them: counters
        self.parts = getattr(optimizer, "parts", (optimizer,))
        for part, made in enumerate(self.parts):
            for index, group in enumerate(made.param_groups):
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, part, index))

    def _update(self, part: int, index: int, parameter: Parameter) -> None:
        """The step of `parameter` alone. The group's own counters stay, so that every parameter starts from them."""
        self.norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        # Its own memory: a gradient may be a view of one that is still on its way, and some optimizers write into it.
        parameter.grad = parameter.grad.clone()
        optimizer = self.parts[part]
        groups = optimizer.param_groups
        alone = {k: v.clone() if isinstance(v, Tensor) else v for k, v in groups[index].items()}
        alone["params"] = [parameter]
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        self.advanced[part, index] = alone

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients of this backward pass. AdapterError names parameters that it did not reach."""
        if missed := [name for name, p in self.parameters.items() if p not in self.norms]:
            raise AdapterError(
                f"{len(missed)} of {len(self.parameters)} trained parameters got no gradient and would never change, "
                f"such as {own_name(missed[0])}: leave them out of what trains, or set memory.checkpointing: none"
            )
        return torch.linalg.vector_norm(torch.stack([self.norms[p] for p in self.parameters.values()]))

    def step(self, closure: Callable | None = None) -> None:
        """Ends the step whose updates the backward pass has made."""
        for (part, index), alone in self.advanced.items():
            group = self.parts[part].param_groups[index]
            group.update({name: value for name, value in alone.items() if name != "params"})
        self.advanced, self.norms = {}, {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to free."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
