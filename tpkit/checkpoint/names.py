"""What tensors a folder of weights names, as cheaply as it can be known: from headers, or from its index alone."""

from __future__ import annotations

from pathlib import Path

from tpkit.checkpoint.safetensors_format import INDEX, SafetensorsFormat, read_index
from tpkit.checkpoint.stored import Checkpoint, Stored
from tpkit.errors import CheckpointError

__all__ = ["has_names_only", "index_alone", "names_in"]


def index_alone(folder: Path) -> Checkpoint | None:
    """Returns the names of an index whose files are not all there; None where they are, or there is no index.

    Types and shapes are not known: they are those of an empty tensor.

    Raises:
        CheckpointError: if the index is damaged.
    """
    index = folder if folder.name == INDEX else folder / INDEX
    if not index.is_file():
        return None
    weight_map, total = read_index(index)
    if all((index.parent / file).is_file() for file in set(weight_map.values())):
        return None
    tensors = {
        name: Stored(dtype="float32", shape=(0,), file=index.parent / file, begin=0)
        for name, file in weight_map.items()
    }
    return Checkpoint(index, tensors, total_size=total)


def has_names_only(checkpoint: Checkpoint) -> bool:
    """Says whether a checkpoint is what `index_alone` returned."""
    return checkpoint.path.name == INDEX


def names_in(folder: Path) -> Checkpoint | None:
    """Returns what safetensors files in a folder hold, or what their index says; None where there is neither.

    Raises:
        CheckpointError: if the files are damaged.
    """
    alone = index_alone(folder)
    if alone is not None:
        return alone
    if not folder.exists() or not SafetensorsFormat.recognises(folder):
        return None
    found = SafetensorsFormat.open(folder)
    if not found.tensors:
        raise CheckpointError(f"{folder}: the safetensors files hold no tensor")
    return found
