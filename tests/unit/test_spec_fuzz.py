"""Whatever stands in a description or a config.json ends in a bound model or in a typed error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.spec_common import BASE, registry
from tpkit.errors import SpecError
from tpkit.spec import describe

WORDS = (
    *("hidden_size", "x", "layer", "attention", "row", "rms", "head", "bias and 3", "1 / 0", "layer_type", "no", ""),
    *("q_norm", "x + mlp(x)", "**", "2 ** 8 ** 2", "hidden_size // 3", "model.embed_tokens"),
)
KEYS = (
    *("when", "is", "do", "norm", "module", "style", "parameter", "role", "repeat", "forward", "packs", "fused", "per"),
    *("order", "from", "default", "every", "per_layer", "size", "over", "tied", "to", "rope", "type", "factor"),
)
plain = st.none() | st.booleans() | st.integers(-3, 5) | st.floats(-2, 2) | st.sampled_from(WORDS) | st.just(2**70)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
KNOWN = registry()
DESCRIPTION = yaml.safe_load(BASE)
SOUND = describe(DESCRIPTION, registry=KNOWN)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = list(places(DESCRIPTION))
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(st.lists(st.tuples(st.sampled_from(PLACES), values, st.none() | st.sampled_from(KEYS)), min_size=1, max_size=3))
def test_any_description(changes: list[tuple[tuple[Any, ...], Any, str | None]]) -> None:
    data = copy.deepcopy(DESCRIPTION)
    for path, value, key in changes:
        try:
            target = data
            for part in path[:-1]:
                target = target[part]
            if key is not None and isinstance(target, dict):
                target[key] = value
            else:
                target[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    try:
        describe(data, registry=KNOWN).bind({}).fingerprint  # noqa: B018
    except SpecError as error:
        assert str(error)


FIELDS = [*DESCRIPTION["config"], "rope_parameters", "layer_types", "text_config", "model_type", "architectures"]


@quick
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_config(config: dict[str, Any]) -> None:
    try:
        SOUND.bind(config).fingerprint  # noqa: B018
    except SpecError as error:
        assert str(error)


@quick
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200) | st.just(BASE).flatmap(
    lambda base: st.integers(0, len(base) - 1).map(lambda at: base[:at] + base[at + 7 :])
))  # fmt: skip
def test_any_text(text: str) -> None:
    from tpkit.spec.yaml12 import read_yaml

    try:
        read_yaml(text, "d.yaml")
    except SpecError as error:
        assert str(error)
