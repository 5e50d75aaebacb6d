"""From a bound description to a proved plan for any number of ranks. Pure: no process group, no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from math import inf
from pathlib import Path

from tpkit.checkpoint.findings import looks_quantised
from tpkit.checkpoint.plan import LoadPlan, plan_load
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.declare import Declaration, declare
from tpkit.division import DividedLayer, divide_layers
from tpkit.dtypes import FLOATS, dtype_name
from tpkit.errors import LoadError, SpecError, UsageError
from tpkit.geometry import stored_shape
from tpkit.layering import PlannedLayer, layers_of
from tpkit.layout import LayerSpec
from tpkit.partition import check_groups, side_size
from tpkit.quant.resolve import Resolver
from tpkit.quant.stated import Stated, stated_in, stated_in_folder
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
        planned: what was planned for each layer, by path: its quant method, its parts; a tied one has its owner's.
        ep: in how many groups the ranks share the experts.
    """

    spec: BoundSpec
    dtype: str
    load: LoadPlan
    ep: int = 1
    layers: Mapping[str, DividedLayer]
    declarations: Mapping[str, Declaration]
    planned: Mapping[str, PlannedLayer]

    def fingerprints(self, registry: Registry) -> dict[str, str]:
        """Returns what must be the same on every rank before they load, by name."""
        nodes = list(self.spec.root.walk())
        chosen = {path: each.choice for path, each in self.planned.items() if each.choice is not None}
        names = {("quant method", choice.name) for choice in chosen.values()}
        names |= {("module", node.word) for node in nodes if node.kind == "module"}
        names |= {("style", node.word) for node in nodes if node.kind == "projection"}
        used = [registry.find(kind, name) for kind, name in sorted(names)]
        plugins = ", ".join(f"{p.kind} {p.name} {p.distribution} {p.version} {p.value}" for p in used)
        checkpoint = self.load.checkpoint
        return {
            "tpkit": version("tpkit"),
            **{f"config.json {name}": repr(value) for name, value in self.spec.values.items()},
            "description": self.spec.fingerprint,
            "checkpoint": checkpoint.digest if checkpoint else "none",
            "dtype": self.dtype,
            "plugins": plugins,
            "quantisation": _digest(f"{path} {c} {c.method.options!r}" for path, c in chosen.items()),
            "experts": str(self.ep),
            "bytes per rank": str([self.load.param_bytes(rank) for rank in range(self.load.ranks)]),
        }


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything of a plan that the number of ranks does not change."""

    spec: BoundSpec
    dtype: str
    checkpoint: Checkpoint | None
    declarations: Mapping[str, Declaration]
    planned: tuple[PlannedLayer, ...]
    ties: tuple[LayerSpec, ...]
    said: bool

    def divide(self, ranks: int, split: Sequence[float] | None = None, ep: int = 1) -> ModelPlan:
        """Divides over ranks and proves the plan; see `plan_model`."""
        if ranks < 1:
            raise UsageError(f"{ranks} ranks: at least one is needed")
        if ranks > MAX_RANKS:
            raise UsageError(f"{ranks} ranks: more than {MAX_RANKS} are taken for a mistake")
        if split is not None and (len(split) != ranks or not all(0 < w < inf for w in (*split, sum(split)))):
            raise UsageError(f"split {list(split)} for {ranks} ranks", hint="give a positive weight for each rank")
        self._check_ep(ranks, ep)
        pairs = [(each.spec, each.form) for each in self.planned]
        divided = divide_layers(pairs, ranks, tuple(split) if split is not None else None, ep)
        by_path = {layer.spec.path: layer for layer in divided}
        planned = {each.spec.path: each for each in self.planned}
        for tie in self.ties:
            by_path[tie.path] = _tied(tie, by_path, self.spec)
            planned[tie.path] = planned[tie.tied_to or ""]
        return ModelPlan(
            spec=self.spec,
            dtype=self.dtype,
            load=self._load(divided, ranks),
            layers=by_path,
            declarations=self.declarations,
            planned=planned,
            ep=ep,
        )

    def _check_ep(self, ranks: int, ep: int) -> None:
        check_groups(ep, ranks)
        if ep > 1 and not any(each.spec.experts for each in self.planned):
            raise UsageError(f"{ep} expert-parallel groups, but {self.spec.source} has no experts")

    def _load(self, divided: list[DividedLayer], ranks: int) -> LoadPlan:
        try:
            return plan_load(
                divided,
                self.ties,
                ranks,
                self.checkpoint,
                self.spec.ignore,
                self.spec.source,
                accepted=self._accepted(),
            )
        except LoadError as error:
            if not self.spec.config and error.hint is None:
                error.hint = "the description is bound to its own defaults: load_spec takes a config.json as `config`"
            elif not self.said and self.checkpoint is not None and looks_quantised(self.checkpoint):
                error.hint = (
                    "the checkpoint looks quantised, but nothing says how: its config.json has no quantization_config; "
                    "name the method with --quant"
                )
            raise

    def _accepted(self) -> dict[str, str]:
        """Returns patterns of tensors that the quant methods know and do not need, and whose they are."""
        chosen = [each.choice for each in self.planned if each.choice is not None]
        return {pattern: choice.name for choice in chosen for pattern in choice.method.unused}


def plan_model(
    spec: BoundSpec,
    *,
    ranks: int,
    checkpoint: Checkpoint | None = None,
    dtype: str = "auto",
    split: Sequence[float] | None = None,
    ep: int = 1,
    registry: Registry | None = None,
) -> ModelPlan:
    """Plans a model.

    Args:
        spec: the bound description.
        ranks: number of ranks.
        checkpoint: stored tensors; None plans from the description alone.
        dtype: "float32", "bfloat16", "float16"; "auto": the checkpoint's, else config.json's, else bfloat16.
        split: a weight per rank, for unequal devices.
        ep: in how many groups the ranks share the experts; the ranks of a group divide each expert's width.
        registry: plugins; None: what is installed.

    Raises:
        SpecError, PluginError, ShardingError, LoadError: whatever does not fit, before a byte of a weight is read.
    """
    return prepare(spec, checkpoint=checkpoint, dtype=dtype, registry=registry).divide(ranks, split, ep)


def prepare(
    spec: BoundSpec, *, checkpoint: Checkpoint | None = None, dtype: str = "auto", registry: Registry | None = None
) -> Prepared:
    """Does the part of `plan_model` that is the same for every number of ranks."""
    registry = registry or Registry.default()
    name = _model_dtype(spec, checkpoint, dtype)
    declarations = _declare(spec, registry, checkpoint)
    resolver = Resolver(registry, _stated(spec, checkpoint))
    planned = [each for declaration in declarations for each in layers_of(declaration, checkpoint, resolver, name)]
    resolver.check_patterns(source.stem(0) for each in planned for source in each.form)
    quantised = any(each.choice is not None and each.choice.name != "none" for each in planned)
    if resolver.said and not quantised:
        raise SpecError(
            f"{resolver.who} names a quant method, but no module gets it",
            hint="the weights are stored unquantised, or its lists leave every module out",
        )
    return Prepared(
        spec=spec,
        dtype=name,
        checkpoint=checkpoint,
        declarations={d.node.path: d for d in declarations},
        planned=tuple(each for each in planned if not each.spec.tied_to),
        ties=tuple(each.spec for each in planned if each.spec.tied_to),
        said=resolver.said,
    )


def _stated(spec: BoundSpec, checkpoint: Checkpoint | None) -> list[Stated]:
    """Returns what the description, config.json, the checkpoint's format and the files beside it say."""
    found = list(spec.quantization)
    if checkpoint is not None:
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        if checkpoint.quantization is not None:
            found += stated_in({"quantization_config": checkpoint.quantization}, checkpoint.path.name)
        elif spec.folder is None or folder.resolve() != spec.folder.resolve():
            found += stated_in_folder(folder)
    return found


def _model_dtype(spec: BoundSpec, checkpoint: Checkpoint | None, dtype: str) -> str:
    if dtype == "auto":
        said = spec.config.get("dtype") or spec.config.get("torch_dtype")
        found = checkpoint.float_dtype if checkpoint is not None else None
        if said and spec.quantization:
            found = None  # most floats of a quantised checkpoint may be scales
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
        return sum(any(checkpoint.has(s) for form in d.forms for s in form) for d in declarations)

    return max(tried, key=found)


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


def _digest(lines: Iterable[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()


def _extent(layer: LayerSpec) -> str:
    divided = any(axis.divided for axis in layer.axes())
    size = f"[{side_size(layer.out)}, {side_size(layer.in_)}]"
    return f"{size} {layer.style}, {'divided over ranks' if divided else 'whole on every rank'}"


def derived_checkpoint(plan: ModelPlan) -> Checkpoint:
    """Returns the checkpoint that a description expects: names, types and shapes, without any file."""
    tensors: dict[str, Stored] = {}
    for layer in plan.load.layers:
        in_size = side_size(layer.spec.in_)
        for _, on_disk, spec in layer.spec.stored:
            for source in layer.form:
                shape = layer.spec.on_disk(spec, source, stored_shape(spec, source, in_size))
                stored = Stored(dtype=spec.dtype, shape=shape, file=Path("(derived)"), begin=0)
                tensors.update((source.tensor(on_disk, expert=n), stored) for n in layer.spec.numbers(source))
    return Checkpoint(Path("(derived)"), tensors)
