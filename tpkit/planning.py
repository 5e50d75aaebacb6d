"""From a bound description to a proved plan for any number of ranks. Pure: no process group, no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import inf
from pathlib import Path

from pydantic import ValidationError

from tpkit.checkpoint.plan import LoadPlan, choose_form, plan_load
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.declare import Declaration, declare
from tpkit.division import DividedLayer, divide_layers
from tpkit.dtypes import FLOATS, dtype_name
from tpkit.errors import LoadError, PluginError, SpecError, UsageError
from tpkit.geometry import stored_shape
from tpkit.layout import LayerSpec, Source
from tpkit.params import LinearSpec, Out, ParamSpec
from tpkit.partition import side_size
from tpkit.quant import QuantMethod
from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec

__all__ = ["ModelPlan", "Prepared", "derived_checkpoint", "plan_model", "prepare"]


MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What every rank builds and loads.

    Attributes:
        spec: the bound description.
        dtype: the model's dtype by name.
        load: the proved load plan.
        layers: divided layers by path; a tied one has its owner's.
        declarations: by path.
        methods: quant method by path, for everything that multiplies or looks up.
        method_names: their registry names.
    """

    spec: BoundSpec
    dtype: str
    load: LoadPlan
    layers: Mapping[str, DividedLayer]
    declarations: Mapping[str, Declaration]
    methods: Mapping[str, QuantMethod]
    method_names: Mapping[str, str]

    def fingerprints(self, registry: Registry) -> dict[str, str]:
        """Returns what must be the same on every rank before they load, by name."""
        nodes = list(self.spec.root.walk())
        names = {("quant method", name) for name in self.method_names.values()}
        names |= {("module", node.word) for node in nodes if node.kind == "module"}
        names |= {("style", node.word) for node in nodes if node.kind == "projection"}
        used = [registry.find(kind, name) for kind, name in sorted(names)]
        plugins = ", ".join(f"{p.kind} {p.name} {p.distribution} {p.version}" for p in used)
        checkpoint = self.load.checkpoint
        return {
            "tpkit": version("tpkit"),
            **{f"config.json {name}": repr(value) for name, value in self.spec.values.items()},
            "description": self.spec.fingerprint,
            "checkpoint": checkpoint.digest if checkpoint else "none",
            "dtype": self.dtype,
            "plugins": plugins,
            "bytes per rank": str([self.load.param_bytes(rank) for rank in range(self.load.ranks)]),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything of a plan that the number of ranks does not change."""

    spec: BoundSpec
    dtype: str
    checkpoint: Checkpoint | None
    declarations: Mapping[str, Declaration]
    methods: Mapping[str, QuantMethod]
    method_names: Mapping[str, str]
    layers: tuple[tuple[LayerSpec, tuple[Source, ...]], ...]
    ties: tuple[LayerSpec, ...]

    def divide(self, ranks: int, split: Sequence[float] | None = None) -> ModelPlan:
        """Divides over ranks and proves the plan; see `plan_model`."""
        if ranks < 1:
            raise UsageError(f"{ranks} ranks: at least one is needed")
        if ranks > MAX_RANKS:
            raise UsageError(f"{ranks} ranks: more than {MAX_RANKS} are taken for a mistake")
        if split is not None and (len(split) != ranks or not all(0 < w < inf for w in (*split, sum(split)))):
            raise UsageError(f"split {list(split)} for {ranks} ranks", hint="give a positive weight for each rank")
        divided = divide_layers(self.layers, ranks, tuple(split) if split is not None else None)
        by_path = {layer.spec.path: layer for layer in divided}
        for tie in self.ties:
            by_path[tie.path] = _tied(tie, by_path, self.spec)
        return ModelPlan(
            spec=self.spec,
            dtype=self.dtype,
            load=self._load(divided, ranks),
            layers=by_path,
            declarations=self.declarations,
            methods=self.methods,
            method_names=self.method_names,
        )

    def _load(self, divided: list[DividedLayer], ranks: int) -> LoadPlan:
        try:
            return plan_load(divided, self.ties, ranks, self.checkpoint, self.spec.ignore, self.spec.source)
        except LoadError as error:
            if not self.spec.config and error.hint is None:
                error.hint = "the description is bound to its own defaults: load_spec takes a config.json as `config`"
            raise


def plan_model(
    spec: BoundSpec,
    *,
    ranks: int,
    checkpoint: Checkpoint | None = None,
    dtype: str = "auto",
    split: Sequence[float] | None = None,
    registry: Registry | None = None,
) -> ModelPlan:
    """Plans a model.

    Args:
        spec: the bound description.
        ranks: number of ranks.
        checkpoint: stored tensors; None plans from the description alone.
        dtype: "float32", "bfloat16", "float16"; "auto": the checkpoint's, else config.json's, else bfloat16.
        split: a weight per rank, for unequal devices.
        registry: plugins; None: what is installed.

    Raises:
        SpecError, PluginError, ShardingError, LoadError: whatever does not fit, before a byte of a weight is read.
    """
    return prepare(spec, checkpoint=checkpoint, dtype=dtype, registry=registry).divide(ranks, split)


def prepare(
    spec: BoundSpec, *, checkpoint: Checkpoint | None = None, dtype: str = "auto", registry: Registry | None = None
) -> Prepared:
    """Does the part of `plan_model` that is the same for every number of ranks."""
    registry = registry or Registry.default()
    name = _model_dtype(spec, checkpoint, dtype)
    declarations = _declare(spec, registry, checkpoint)
    methods, names = _methods(spec, registry, declarations)
    layers: list[tuple[LayerSpec, tuple[Source, ...]]] = []
    ties: list[LayerSpec] = []
    for declaration in declarations:
        path = declaration.node.path
        form = choose_form(declaration.forms, checkpoint)
        params = () if declaration.tied_to else _params(declaration, form, methods.get(path), name, checkpoint)
        layer = LayerSpec(
            path=path,
            out=declaration.out,
            in_=declaration.in_,
            forms=declaration.forms,
            params=params,
            style=declaration.style,
            method=names.get(path, ""),
            tied_to=declaration.tied_to,
        )
        if declaration.tied_to:
            ties.append(layer)
        else:
            layers.append((layer, form))
    return Prepared(
        spec=spec,
        dtype=name,
        checkpoint=checkpoint,
        declarations={d.node.path: d for d in declarations},
        methods=methods,
        method_names=names,
        layers=tuple(layers),
        ties=tuple(ties),
    )


def _model_dtype(spec: BoundSpec, checkpoint: Checkpoint | None, dtype: str) -> str:
    if dtype == "auto":
        said = spec.config.get("dtype") or spec.config.get("torch_dtype")
        found = checkpoint.float_dtype if checkpoint is not None else None
        dtype = found or (str(said) if said else "bfloat16")
    name = dtype_name(dtype)
    if name not in FLOATS:
        raise UsageError(f"a model cannot compute in {name}", hint="use float32, bfloat16 or float16")
    return name


def _declare(spec: BoundSpec, registry: Registry, checkpoint: Checkpoint | None) -> list[Declaration]:
    """Declares the tree under the prefix under which most of it is found; the first of equals."""
    tried = [declare(spec, registry, rename) for rename in spec.prefixes]
    if checkpoint is None or len(tried) == 1:
        return tried[0]

    def found(declarations: list[Declaration]) -> int:
        return sum(any(checkpoint.holds(s.name) for form in d.forms for s in form) for d in declarations)

    return max(tried, key=found)


def _methods(
    spec: BoundSpec, registry: Registry, declarations: Sequence[Declaration]
) -> tuple[dict[str, QuantMethod], dict[str, str]]:
    quantised = spec.config.get("quantization_config")
    name, options = "none", None
    if quantised is not None:
        if not isinstance(quantised, Mapping) or not isinstance(quantised.get("quant_method"), str):
            raise SpecError(
                "config.json: quantization_config names no quant_method", hint="it must be a mapping with one"
            )
        name, options = quantised["quant_method"], {k: v for k, v in quantised.items() if k != "quant_method"}
    made = {"none": _method(registry, "none", None)}
    methods, names = {}, {}
    for declaration in declarations:
        if not declaration.in_:
            continue
        chosen = name if declaration.node.kind == "projection" and declaration.style != "vocab" else "none"
        if chosen not in made:
            made[chosen] = _method(registry, chosen, options)
        methods[declaration.node.path], names[declaration.node.path] = made[chosen], chosen
    return methods, names


def _method(registry: Registry, name: str, options: Mapping[str, object] | None) -> QuantMethod:
    kind = registry.load("quant method", name)
    if not (isinstance(kind, type) and issubclass(kind, QuantMethod)):
        raise PluginError(f"quant method {name!r} is {kind!r}, not a subclass of tpkit.QuantMethod")
    try:
        made = kind(kind.Options(**(options or {})))
    except ValidationError as cause:
        who = registry.find("quant method", name)
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in cause.errors())
        raise PluginError(
            f"quant method {name!r} of {who.distribution} {who.version} does not take the options of config.json's "
            f"quantization_config: {wrong}"
        ) from cause
    return made


def _params(
    declaration: Declaration,
    form: tuple[Source, ...],
    method: QuantMethod | None,
    dtype: str,
    checkpoint: Checkpoint | None,
) -> tuple[tuple[str, ParamSpec], ...]:
    if method is None:
        return (("weight", ParamSpec(dtype, dims=(Out(),))),)
    linear = LinearSpec(
        name=declaration.node.path,
        in_features=side_size(declaration.in_),
        segments=tuple((part.name, part.size) for part in declaration.out),
        dtype=dtype,
        embedding=declaration.node.kind == "module",
        transposed=getattr(declaration.node.options, "transposed", False),
        stored={source.name: checkpoint.under(source.name) for source in form} if checkpoint else {},
    )
    return method.parameters(linear, declaration.bias)


def _tied(tie: LayerSpec, by_path: Mapping[str, DividedLayer], spec: BoundSpec) -> DividedLayer:
    owner = by_path.get(tie.tied_to or "")
    if owner is None:
        raise SpecError(f"{spec.source}: {tie.path} is tied to {tie.tied_to}, which holds no parameters")
    if (owner.spec.out, owner.spec.in_) != (tie.out, tie.in_):
        raise SpecError(
            f"{spec.source}: {tie.path} is tied to {tie.tied_to}, but they are not alike: "
            f"{_extent(tie)} and {_extent(owner.spec)}",
            hint="a shared weight has one size, and is divided for both or for neither",
        )
    return owner


def _extent(layer: LayerSpec) -> str:
    divided = any(axis.divided for axis in layer.axes())
    size = f"[{side_size(layer.out)}, {side_size(layer.in_)}]"
    return f"{size} {layer.style}, {'divided over ranks' if divided else 'whole on every rank'}"


def derived_checkpoint(plan: ModelPlan) -> Checkpoint:
    """Returns the checkpoint that a description expects: names, types and shapes, without any file."""
    tensors: dict[str, Stored] = {}
    for layer in plan.load.layers:
        in_size = side_size(layer.spec.in_)
        for name, spec in layer.spec.params:
            for source in layer.form:
                shape = stored_shape(spec, source, in_size)
                shape = tuple(reversed(shape)) if spec.transposed else shape
                tensors[source.tensor(name)] = Stored(dtype=spec.dtype, shape=shape, file=Path("(derived)"), begin=0)
    return Checkpoint(Path("(derived)"), tensors)
