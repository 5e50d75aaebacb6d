"""What does not fit between a description and a checkpoint, collected so that one error tells all of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpkit.checkpoint.stored import Checkpoint, Stored, listed
from tpkit.division import DividedLayer
from tpkit.dtypes import FLOATS
from tpkit.errors import SHOWN, LoadError, did_you_mean
from tpkit.layout import LayerSpec
from tpkit.params import ParamSpec

__all__ = ["Findings", "check_header", "looks_quantised", "missing_line"]


#: last components of names that only quantised weights have
_TELLING = frozenset(
    ("qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "absmax", "SCB", "scales")
)


def looks_quantised(checkpoint: Checkpoint) -> bool:
    """Says whether names or types of tensors tell that weights are quantised."""
    return any(
        name.rpartition(".")[2] in _TELLING or (name.endswith(".weight") and stored.dtype not in FLOATS)
        for name, stored in checkpoint.tensors.items()
    )


class Findings:
    """Everything that is wrong, under headings."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {}
        self.hint: str | None = None

    def shown(self, group: str) -> bool:
        """Says whether one more finding would be printed: only then it is worth looking for names like it."""
        return len(self.groups.get(group, ())) < SHOWN

    def add(self, group: str, line: str) -> None:
        """Notes one finding."""
        self.groups.setdefault(group, []).append(line)

    def ledger(self, layer: DividedLayer) -> None:
        """Notes elements of a layer that are not written exactly once, and stored ones that no rank reads."""
        path = layer.spec.path
        for rank, name, missing, doubled in layer.geometry.gaps:
            line = f"{path}.{name} on rank {rank}: {missing} elements not written, {doubled} written more than once"
            self.add("not written exactly once", line)
        for (index, name), count in layer.geometry.unread.items():
            stored = dict(layer.spec.params)[name].stored or name
            self.add("read by no rank", f"{count} elements of {layer.form[index].tensor(stored)}")

    def raise_if_any(self, path: Path | None, description: str) -> None:
        """Raises one error with all findings."""
        if self.groups:
            where = f"{path} does not fit {description}" if path else f"{description} cannot be planned"
            raise LoadError(where, self.groups, hint=self.hint)


def missing_line(tensor: str, spec: LayerSpec, checkpoint: Checkpoint, near: bool = True) -> str:
    """Returns what is said of a tensor that is not there; with `near`, also what is there instead."""
    stem, _, last = tensor.rpartition(".")
    seen = sorted(n.removeprefix(stem + ".") for n in checkpoint.under(stem))
    beside = f"; beside it: {listed(seen)}" if seen else _nearest(tensor, spec, checkpoint) if near else ""
    bare = tensor.startswith(f"{spec.path}_") or tensor == spec.path
    goal = f"{spec.path}.{last}" if spec.path and not bare else tensor
    return f"{tensor}{'' if goal == tensor else f' (for {goal})'}{beside}"


def _nearest(tensor: str, spec: LayerSpec, checkpoint: Checkpoint) -> str:
    """Returns a hint at a name like that of a missing tensor, among those that are no other part's of its layer."""
    own = {name for form in spec.forms for name in spec.names(form)}
    return did_you_mean(tensor, [name for name in checkpoint.tensors if name not in own])


def check_header(
    tensor: str, stored: Stored, param: ParamSpec, wanted: tuple[int, ...], findings: Findings, spec: LayerSpec
) -> None:
    """Notes a stored tensor whose shape (up to dimensions of one element) or type is not what is wanted on disk."""
    if _squeezed(stored.shape) != _squeezed(wanted):
        turned = stored.shape == (*wanted[:-2], *reversed(wanted[-2:]))
        hint = "; it looks transposed: say `transposed: true`" if turned else ""
        findings.add(
            "wrong shape",
            f"{tensor} is {list(stored.shape)} in {stored.file.name}, {spec.path or 'the layer'} needs "
            f"{list(wanted)}{hint}",
        )
    if stored.dtype != param.dtype and not {stored.dtype, param.dtype} <= FLOATS:
        findings.add(
            "wrong type",
            f"{tensor} is {stored.dtype} in {stored.file.name}, {spec.path or 'the layer'} holds {param.dtype}: "
            "these are not the same values in another type; name the quant method that stored them",
        )


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)
