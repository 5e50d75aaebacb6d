"""From the bound module tree to layers: which node holds parameters, on which axes, under which names on disk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpkit.errors import ShardingError, SpecError
from tpkit.forms import forms_of, of_experts
from tpkit.layout import Source, fused
from tpkit.modules import Child, Declared, ModuleType, Sides, hidden
from tpkit.params import Dim, Fixed, Out
from tpkit.partition import Axis, Features, Side, side_size
from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec, Node
from tpkit.styles import Style

__all__ = ["Declaration", "declare"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A node that holds parameters (or shares another's), before its quant method is asked what they are.

    Attributes:
        node: the node.
        style: its parallel style; "replicated" for norms.
        out, in_: its sides; `in_` is empty for norms and plain parameters.
        forms: ways it may be stored, preferred first.
        bias: it has a bias.
        weights: dimensions of the parameters of a node without an input, by name.
        stored: name on disk of its one parameter, where that is not the parameter's own.
        tied_to: path of the node whose parameters it shares.
        experts: it stands for as many alike ones as this axis has units.
    """

    node: Node
    style: str
    out: Side
    in_: Side = ()
    forms: tuple[tuple[Source, ...], ...]
    bias: bool = False
    weights: tuple[tuple[str, tuple[Dim, ...]], ...] = (("weight", (Out(),)),)
    stored: str | None = None
    tied_to: str | None = None
    experts: Axis | None = None


def declare(spec: BoundSpec, registry: Registry, rename: Mapping[str, str] | None = None) -> list[Declaration]:
    """Returns the parameter-bearing nodes of a tree, in written order.

    Args:
        spec: the bound description.
        registry: where module types and styles come from.
        rename: tree path -> path in the checkpoint, for trees found under another prefix.

    Raises:
        SpecError: a projection whose sides nothing tells, or whose style does not fit them.
    """
    walk = _Walk(spec, registry, dict(rename or {}))
    walk.children(spec.root, None)
    return walk.found


class _Walk:
    def __init__(self, spec: BoundSpec, registry: Registry, rename: dict[str, str]) -> None:
        self.hidden_size = int(spec.values["hidden_size"])
        self.vocab_size = spec.values.get("vocab_size")
        self.registry = registry
        self.rename = rename
        self.found: list[Declaration] = []

    def children(self, node: Node, declared: Declared | None, around: Node | None = None) -> None:
        """Declares what is below a node; `around` is the one in a module that stands for several alike ones."""
        for child in node.children:
            several = child if child.copies is not None else around
            if several is not None and child.kind not in ("projection", "container"):
                raise SpecError(f"{child.where}: {child.path}: experts are made of projections, not of a {child.kind}")
            if child.kind == "projection":
                self.found.append(self._projection(child, declared, several))
            elif child.kind == "norm":
                self.found.append(self._norm(child, declared))
            elif child.kind == "parameter":
                self.found.append(self._parameter(child, declared))
            elif child.kind == "module":
                self._module(child)
            else:
                self.children(child, declared, several)
                continue
            if child.kind == "projection":
                self.children(child, declared, several)

    def _module(self, node: Node) -> None:
        kind: type[ModuleType] = self.registry.load("module", node.word)
        children = {
            m.node.role: Child(style=m.node.word, copies=m.copies)
            for m in node.members()
            if m.node.kind == "projection"
        }
        declared = kind.declare(node.options, self.hidden_size, children)
        if "" in declared.sides:
            sides = declared.sides[""]
            forms = (fused(self._disk(node.path), sides.out),)
            self.found.append(
                Declaration(node=node, style=node.options.style, out=sides.out, in_=sides.in_, forms=forms)
            )
        _check_disable_tp(node, declared)
        self.children(node, _as_divided(node, declared))

    def _projection(self, node: Node, declared: Declared | None, several: Node | None) -> Declaration:
        options = node.options
        style: Style = self.registry.load("style", node.word)
        sides = self._sides(node, declared)
        if options.disable_tp:
            sides = Sides(in_=_undivided(sides.in_), out=_undivided(sides.out))
        else:
            _check_style(node, style, sides)
        if options.tied and options.bias:
            raise SpecError(f"{node.where}: {node.path}: a projection that is tied has no bias of its own")
        try:
            forms = forms_of(node, self._disk(node.path), sides.out, declared.counts if declared else {})
        except ShardingError as cause:
            raise SpecError(f"{node.where}: {node.path}: {cause.message}", hint=cause.hint) from cause
        return Declaration(
            node=node,
            style=node.word,
            out=sides.out,
            in_=sides.in_,
            forms=forms if several is None else of_experts(forms, self._disk(several.path), several.stacked),
            bias=options.bias,
            tied_to=options.tied.to if options.tied else None,
            experts=Axis(name="experts", units=several.copies or 0, over="groups") if several is not None else None,
        )

    def _sides(self, node: Node, declared: Declared | None) -> Sides:
        if declared is not None and node.role in declared.sides:
            if node.options.in_features is not None or node.options.out_features is not None:
                raise SpecError(
                    f"{node.where}: {node.path}: in_features and out_features are for a projection that stands alone; "
                    "the module around this one says its sizes"
                )
            return declared.sides[node.role]
        width, given = node.options.in_features or self.hidden_size, node.options.out_features
        if node.word == "vocab" and self.vocab_size is not None:
            axis = Axis(name="vocab", units=int(self.vocab_size))
            return Sides(in_=hidden(width), out=(Features(name="", axis=axis),))
        if node.word == "vocab":
            raise SpecError(f"{node.where}: {node.path}: the description declares no vocab_size, which a head needs")
        if given is not None:
            return Sides(in_=hidden(width), out=hidden(given))
        raise SpecError(
            f"{node.where}: {node.path}: nothing tells the sizes of this {node.word} projection",
            hint="put it into a module that has a role for it, or give in_features and out_features",
        )

    def _parameter(self, node: Node, declared: Declared | None) -> Declaration:
        """A tensor under its own name, without ``.weight``: its stem is the path of the module around it."""
        sizes, lies = node.options.parameter, declared.sides.get(node.role) if declared else None
        if declared is None:
            raise SpecError(f"{node.where}: {node.path}: a parameter needs a module around it that computes with it")
        side: Side = hidden(1)
        dims: tuple[Dim, ...] = tuple(map(Fixed, sizes)) or (Fixed(1),)
        if node.options.style == "per_head":
            if lies is None or not sizes or sizes[0] != side_size(lies.out):
                raise SpecError(
                    f"{node.where}: {node.path}: per_head, with sizes {list(sizes)}: the module around it has "
                    f"{f'{side_size(lies.out)} heads for it' if lies else 'no heads for it'}"
                )
            side, dims = lies.out, (Out(), *dims[1:])
        elif lies is not None:
            if any(part.axis is not None and part.axis.divided for part in lies.out):
                raise SpecError(f"{node.where}: {node.path}: it follows its heads over the ranks: say style: per_head")
            wanted = side_size(lies.out)
            if sizes != (wanted,):
                told = f"sizes {list(sizes)}, but the module around it needs [{wanted}]"
                raise SpecError(f"{node.where}: {node.path}: {told}")
        stem = self._disk(node.path).rpartition(".")[0]
        return Declaration(
            node=node,
            style="replicated" if side[0].axis is None else "column",
            out=side,
            forms=(fused(stem, side),),
            weights=(("value", dims),),  # its own name might be one that a layer uses itself
            stored=node.name,
        )

    def _norm(self, node: Node, declared: Declared | None) -> Declaration:
        options = node.options
        size = declared.width(node.role, options.over) if declared and options.over else options.size
        lies = declared.sides.get(node.role) if declared else None
        known = " or ".join(declared.over) if declared else ""
        if size is None:
            raise SpecError(
                f"{node.where}: {node.path}: over: {options.over} means nothing here; known: {known or 'nothing'}"
            )
        if lies is not None and options.over is None:
            raise SpecError(f"{node.where}: {node.path}: say what it goes over: {known}")
        side: Side = (Features(name="", unit=size),)
        dims: tuple[Dim, ...] = (Out(),)
        if lies is not None and options.weight == "per_head":
            side, dims = (replace(lies.out[0], unit=1),), (Out(), Fixed(size))
        elif lies is not None and declared is not None and options.over in declared.whole:
            side = lies.out
        names = ["weight"] if options.affine else []
        if options.affine and getattr(options, "bias", False):
            names.append("bias")
        return Declaration(
            node=node,
            style="replicated" if side[0].axis is None else "column",
            out=side,
            forms=(fused(self._disk(node.path), side),),
            weights=tuple((name, dims) for name in names),
        )

    def _disk(self, path: str) -> str:
        for tree, disk in self.rename.items():
            if path == tree or path.startswith(tree + "."):
                return (disk + path[len(tree) :]).removeprefix(".")
        return path


def _undivided(side: Side) -> Side:
    return tuple(replace(p, axis=replace(p.axis, divided=False)) if p.axis else p for p in side)


def _check_style(node: Node, style: Style, sides: Sides) -> None:
    on_axis = {name for name, side in (("in", sides.in_), ("out", sides.out)) if any(part.axis for part in side)}
    if on_axis != ({style.divides} if style.divides else set()):
        raise SpecError(
            f"{node.where}: {node.path}: style {style.name} divides {style.divides or 'neither side'}, "
            f"but its {' and '.join(sorted(on_axis)) or 'no'} side lies on an axis",
            hint="column styles divide the output, row divides the input",
        )
    if style.segments == 1 and len(sides.out) > 1:
        raise SpecError(
            f"{node.where}: {node.path}: style {style.name} is not packed, its output has {len(sides.out)} parts"
        )


def _as_divided(node: Node, declared: Declared) -> Declared:
    """Norms and parameters follow the projections on their axis: where those say disable_tp, they are not divided."""
    whole = {
        part.axis
        for child in (member.node for member in node.members())
        if child.kind == "projection" and child.options.disable_tp and child.role in declared.sides
        for part in (*declared.sides[child.role].in_, *declared.sides[child.role].out)
    }
    if not whole:
        return declared
    alone = {member.node.role for member in node.members() if member.node.kind in ("norm", "parameter")}
    sides = {
        role: replace(found, out=_undivided(found.out)) if role in alone and found.out[0].axis in whole else found
        for role, found in declared.sides.items()
    }
    return replace(declared, sides=sides)


def _check_disable_tp(node: Node, declared: Declared) -> None:
    """An axis of a module is divided for all its projections or for none: partners must agree."""
    seen: dict[Axis, tuple[bool, str]] = {}
    for child in (member.node for member in node.members()):
        if child.kind != "projection" or child.role not in declared.sides:
            continue
        sides = declared.sides[child.role]
        for part in (*sides.in_, *sides.out):
            if part.axis is None:
                continue
            alone, other = seen.setdefault(part.axis, (child.options.disable_tp, child.name))
            if alone != child.options.disable_tp:
                raise SpecError(
                    f"{node.where}: {node.path}: {other} and {child.name} share the axis {part.axis.name!r} "
                    f"({part.axis.units} units), but only one of them says disable_tp",
                    hint="say disable_tp on both, or on neither",
                )
