"""Model descriptions: YAML in, a bound module tree out. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec, Call, Node, Step, Term
from tpkit.spec.description import Description
from tpkit.spec.find import description_names, read_source
from tpkit.spec.overrides import apply_overrides, split_overrides
from tpkit.spec.rope import check_scaling
from tpkit.spec.words import Layout, NormOptions, Pack, ParameterOptions, ProjectionOptions, Tied

__all__ = [
    "BoundSpec",
    "Call",
    "Description",
    "Layout",
    "Node",
    "NormOptions",
    "Pack",
    "ParameterOptions",
    "ProjectionOptions",
    "Step",
    "Term",
    "Tied",
    "check_scaling",
    "describe",
    "description_names",
    "load_spec",
]


def describe(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> Description:
    """Reads and checks a description without a model's config.json.

    Args:
        source: a path, the name of an installed description (``llama`` or ``llama.yaml``), or a mapping; a path wins
            over a name.
        overrides: values that replace the description's, by dotted path (``tree.lm_head.disable_tp``).
        registry: what its words may name; None: what is installed.

    Raises:
        SpecError: that lists everything that is wrong with it, in all branches.
        PluginError: if a plugin it names is broken.
    """
    registry = Registry.default() if registry is None else registry
    name, data = read_source(source, registry)
    fields, changes = split_overrides(overrides)
    return Description(apply_overrides(data, changes, fields), name, registry)


def load_spec(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    quant: str | Mapping[str, Any] | None = None,
    registry: Registry | None = None,
) -> BoundSpec:
    """Reads a description and binds it to a model's config.json.

    Args:
        source: a path, the name of an installed description (``llama`` or ``llama.yaml``), or a mapping; a path wins
            over a name.
        config: a checkpoint folder, the path of a config.json, or its content; None: the description's defaults.
            A file that carries its own metadata (GGUF) serves too.
        overrides: by dotted path: ``config.<field>`` sets a field over config.json (``config.num_hidden_layers``),
            other paths replace that value of the description (``tree.lm_head.disable_tp``, ``ignore``).
        quant: a quant method by name, or a mapping with ``method`` and its options; ``dequantize: true`` holds dense
            weights. It must agree with what the checkpoint says of itself.
        registry: what the description's words may name; None: what is installed.

    Raises:
        SpecError: that lists everything that is wrong with the description, or does not fit config.json.
        PluginError: if a plugin it names is broken.

    Example:
        >>> spec = load_spec("llama.yaml", config="checkpoint/", overrides={"config.num_hidden_layers": 2})
        >>> spec.values["hidden_size"]
        576
    """
    fields, _ = split_overrides(overrides)
    return describe(source, overrides=overrides, registry=registry).bind(config, fields, quant)
