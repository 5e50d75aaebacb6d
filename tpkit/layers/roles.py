"""Base of modules whose children are found by role and registered under the description's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpkit.errors import PluginError, SpecError
from tpkit.layers.parallel import ParallelLinear

__all__ = ["Parent", "RoleModule"]


class Parent(nn.Module):
    """A module with children under names of a description: none of them may be one that its class uses itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()) and not isinstance(value, nn.Module):
            raise SpecError(f"{type(self).__name__} uses the name {name!r} itself; a child cannot have it")
        super().__setattr__(name, value)


class RoleModule(Parent):
    """A module with named children, each in a role. Parameter names follow the names, the code asks for roles.

    Args:
        children: role -> (name, module). A dotted name is that of a module in another one, made if it is not there.
    """

    def __init__(self, children: Mapping[str, tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        for role, (name, module) in children.items():
            _hang(self, name, module)
            self._names[role] = name

    def child(self, role: str) -> nn.Module | None:
        """Returns the child in a role, or None."""
        return self.get_submodule(self._names[role]) if role in self._names else None

    def parameter(self, role: str) -> torch.Tensor | None:
        """Returns the tensor of the parameter in a role, or None.

        Raises:
            PluginError: if something else is in that role.
        """
        found = self.child(role)
        value = None if found is None else found._parameters.get("value")
        if found is not None and value is None:
            raise PluginError(f"{type(self).__name__} needs a parameter as {role}, not a {type(found).__name__}")
        return value

    def projection(self, role: str) -> ParallelLinear:
        """Returns the projection in a role.

        Raises:
            PluginError: if there is none, or a style plugin built something else.
        """
        found = self.child(role)
        if not isinstance(found, ParallelLinear):
            raise PluginError(
                f"{type(self).__name__} needs a parallel projection as {role}, not {type(found).__name__}"
            )
        return found


def _hang(parent: nn.Module, name: str, module: nn.Module) -> None:
    first, _, rest = name.partition(".")
    if rest:
        if first not in parent._modules:
            _hang(parent, first, nn.Module())
        _hang(parent.get_submodule(first), rest, module)
        return
    if hasattr(parent, first):
        raise SpecError(f"{type(parent).__name__} uses the name {first!r} itself; a child cannot have it")
    parent.add_module(first, module)
