"""From declared nodes to layers: how each is stored, by which quant method, and in which parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpkit.checkpoint.plan import choose_form
from tpkit.checkpoint.stored import Checkpoint
from tpkit.declare import Declaration
from tpkit.errors import ShardingError, SpecError
from tpkit.layout import LayerSpec, Source, View
from tpkit.params import LinearSpec, ParamSpec
from tpkit.partition import side_size
from tpkit.quant.resolve import Choice, Resolver
from tpkit.quant.stated import Stated, stated_word
from tpkit.quant.target import Target

__all__ = ["PlannedLayer", "layers_of"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A layer before it is divided.

    Attributes:
        spec: what is stored of it, and on which axes.
        form: how it is stored.
        choice: its quant method; None for norms, and for a packed projection that is built in parts.
        linear: what the method was asked.
        parts: paths of the layers it consists of.
    """

    spec: LayerSpec
    form: tuple[Source, ...]
    choice: Choice | None = None
    linear: LinearSpec | None = None
    parts: tuple[str, ...] = ()


def layers_of(
    declaration: Declaration, checkpoint: Checkpoint | None, resolver: Resolver, dtype: str
) -> list[PlannedLayer]:
    """Returns a node's layer; the layers of its parts follow it where their quant methods or stored types differ.

    Raises:
        SpecError, PluginError: what the rules for its parts contradict, or a plugin gets wrong.
    """
    form = _ordered(choose_form(declaration.forms, checkpoint), checkpoint)
    node = declaration.node
    if not declaration.in_ or declaration.tied_to:
        weights = () if declaration.tied_to else declaration.weights
        held = getattr(node.options, "dtype", None) or dtype if node.kind == "parameter" else dtype
        params = tuple((name, ParamSpec(held, dims=dims, stored=declaration.stored)) for name, dims in weights)
        return [PlannedLayer(spec=_spec(declaration, params), form=form)]
    own = _own(declaration)
    choices = _choices(declaration, form, checkpoint, resolver, own)
    alone = [_linear(declaration, (source,), checkpoint, dtype) for source in form]
    answers = [c.method.parameters(linear, declaration.bias) for c, linear in zip(choices, alone, strict=True)]
    if all(choice.like(choices[0]) for choice in choices) and all(answer == answers[0] for answer in answers):
        linear, answer, choice = alone[0], answers[0], choices[0]
        if len(form) > 1:  # they are alike part by part: as one layer they may still be declared otherwise
            linear = _linear(declaration, form, checkpoint, dtype)
            answer = choice.method.parameters(linear, declaration.bias)
        spec = _spec(declaration, answer, method=str(choice))
        return [PlannedLayer(spec=spec, form=form, choice=choice, linear=linear)]
    names = _part_names(form)
    parts = [
        PlannedLayer(
            spec=replace(
                _spec(declaration, params, method=str(choice)),
                path=f"{node.path}.{name}",
                out=tuple(part for part in declaration.out if part.name in dict(source.views)),
                forms=((source,),),
            ),
            form=(source,),
            choice=choice,
            linear=replace(linear, name=f"{node.path}.{name}"),
        )
        for name, source, choice, linear, params in zip(names, form, choices, alone, answers, strict=True)
    ]
    whole = PlannedLayer(
        spec=_spec(declaration, (), method="in parts"), form=form, parts=tuple(part.spec.path for part in parts)
    )
    return [whole, *parts]


def _spec(declaration: Declaration, params: tuple[tuple[str, ParamSpec], ...], method: str = "") -> LayerSpec:
    return LayerSpec(
        path=declaration.node.path,
        out=declaration.out,
        in_=declaration.in_,
        forms=declaration.forms,
        params=params,
        style=declaration.style,
        method=method,
        tied_to=declaration.tied_to,
        experts=declaration.experts,
    )


def _own(declaration: Declaration) -> Stated | None:
    node = declaration.node
    said = getattr(node.options, "quant", None)
    return None if said is None else stated_word(said, f"{node.where}: {node.path} quant")


def _linear(
    declaration: Declaration, sources: Sequence[Source], checkpoint: Checkpoint | None, dtype: str
) -> LinearSpec:
    held = {name for source in sources for name, _ in source.views}
    return LinearSpec(
        name=declaration.node.path,
        in_features=side_size(declaration.in_),
        segments=tuple((part.name, part.size) for part in declaration.out if part.name in held),
        dtype=dtype,
        embedding=declaration.node.kind == "module",
        transposed=getattr(declaration.node.options, "transposed", False),
        stored={source.stem(0): checkpoint.headers(source) for source in sources} if checkpoint else {},
    )


def _choices(
    declaration: Declaration,
    form: tuple[Source, ...],
    checkpoint: Checkpoint | None,
    resolver: Resolver,
    own: Stated | None,
) -> list[Choice]:
    """Asks for every source; where one holds several parts that rules may name, all of them must get the same."""
    packed = bool(getattr(declaration.node.options, "packs", ()))
    apart, whole = declaration.forms[0], declaration.forms[1 if packed else 0][0].name
    parts = [source.name for source in apart] if packed else []
    found = []
    for source in form:
        names = parts if len(source.views) > 1 and parts else [source.name]
        answers = {}
        for name in names:
            target = _target(declaration, name, whole, parts, source, checkpoint)
            answers[name] = resolver.choose(target.of(0, resolver.patterns), own)
            if declaration.experts is not None:
                _check_alike(declaration, target, resolver, own, answers[name])
        first = answers[names[0]]
        if not all(answer.like(first) for answer in answers.values()):
            said = ", ".join(f"{name.rpartition('.')[2]}: {answer}" for name, answer in answers.items())
            raise SpecError(
                f"{declaration.node.path} is stored fused as {source.name}, but the quantisation's rules treat its "
                f"parts differently ({said})",
                hint="name the fused projection in the rules, or all of its parts",
            )
        found.append(first)
    return found


def _target(
    declaration: Declaration,
    name: str,
    whole: str,
    parts: list[str],
    source: Source,
    checkpoint: Checkpoint | None,
) -> Target:
    node = declaration.node
    last = name.rpartition(".")[2]
    in_tree = [node.path] if name == whole else [f"{node.path.rpartition('.')[0]}.{last}".lstrip("."), node.path]
    aliases = dict.fromkeys(alias for alias in (whole, *in_tree) if alias != name)
    kind = "embedding" if node.kind == "module" else "head" if declaration.style == "vocab" else "linear"
    held = dict(source.views)
    return Target(
        name=name,
        aliases=tuple(aliases),
        siblings=tuple(part for part in parts if part != name),
        kind=kind,  # type: ignore[arg-type]
        role=node.role,
        in_features=side_size(declaration.in_),
        out_features=sum(part.size for part in declaration.out if part.name in held),
        stored=checkpoint.headers(source) if checkpoint else {},
    )


def _check_alike(
    declaration: Declaration, target: Target, resolver: Resolver, own: Stated | None, first: Choice
) -> None:
    """Checks that experts which a rule tells from the first one get the same all the same, by other rules."""
    assert declaration.experts is not None  # noqa: S101 - asked for where it is there
    told: dict[int, str] = {}
    for (pattern, dialect), _ in list(resolver.patterns.items()):
        told |= dict.fromkeys(target.apart(pattern, dialect, declaration.experts.units), pattern)
    for expert, pattern in sorted(told.items()):
        answer = resolver.choose(target.of(expert, resolver.patterns), own)
        if not answer.like(first):
            raise SpecError(
                f"{declaration.node.path}: the quantisation's rule {pattern!r} treats expert {expert} otherwise than "
                f"expert 0 ({answer}, not {first}); experts of one layer are quantised alike here",
            )


def _part_names(form: tuple[Source, ...]) -> list[str]:
    names = [source.name.rpartition(".")[2] for source in form]
    return names if len(set(names)) == len(names) else [source.name.replace(".", "_") for source in form]


def _ordered(form: tuple[Source, ...], checkpoint: Checkpoint | None) -> tuple[Source, ...]:
    """Reads rows where the checkpoint's format keeps them, if that is not the order of Hugging Face."""
    if checkpoint is None or not checkpoint.orders:
        return form
    ordered = []
    for source in form:
        order = checkpoint.orders.get(source.name)
        if order is not None:
            if (
                len(source.views) != 1
                or source.views[0][1] != View(0, (source.size,), (1,))
                or order.size != source.size
            ):
                raise ShardingError(
                    f"{source.name}: {checkpoint.path.name} keeps {order.size} rows in an order of its own, but the "
                    f"description has {source.size} rows there, as {len(source.views)} segments"
                )
            source = replace(source, views=((source.views[0][0], order),))
        ordered.append(source)
    return tuple(ordered)
