"""From a description and a checkpoint to a loaded model, on every rank alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from tpkit.checkpoint.dummy import DummyReader
from tpkit.checkpoint.hub import locate
from tpkit.checkpoint.load import load_model
from tpkit.checkpoint.memory import AnonymousMemory
from tpkit.checkpoint.open import open_checkpoint
from tpkit.checkpoint.reader import Reader
from tpkit.distributed.group import TensorParallel
from tpkit.errors import UsageError
from tpkit.model import Model
from tpkit.planning import ModelPlan, Prepared, derived_checkpoint, prepare
from tpkit.registry import Registry
from tpkit.spec.bound import BoundSpec

__all__ = ["build"]


def build(
    spec: BoundSpec,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    tp: object = None,
    dummy_weights: bool = False,
    seed: int = 0,
    split: Sequence[float] | None = None,
    ep: int = 1,
    registry: Registry | None = None,
    reader: Reader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Builds a model on this rank and loads its weights. Every rank of the group calls it with the same arguments.

    Args:
        spec: a bound description, see `load_spec`.
        checkpoint: folder or file; None: the local copy of the hub id that the description names.
        dtype: a torch dtype, its name, or "auto": the checkpoint's.
        device: where parameters live; None: this rank's CUDA device if the ranks talk over NCCL, else torch's default.
        tp: a ProcessGroup or a 1-d DeviceMesh; None: every rank of an initialised torch.distributed world, else one.
        dummy_weights: seeded random weights, no checkpoint.
        seed: of the random weights.
        split: a weight per rank, for unequal devices.
        ep: in how many groups the ranks share the experts of each layer.
        registry: plugins; None: what is installed.
        reader: reads the checkpoint's bytes; None: mapped files.
        progress: called with bytes read and bytes to read.

    Returns:
        the model in eval mode.

    Raises:
        TpkitError: anything that does not fit, on the rank where it happens; `RankError` on the others.
    """
    given: object = spec
    if not isinstance(given, BoundSpec):
        raise UsageError(f"build takes a bound description, not {type(spec).__name__}", hint="see load_spec")
    place = TensorParallel.of(tp)
    registry = registry or Registry.default()
    where = place.together(lambda: _device(device, place))

    def work() -> ModelPlan:
        prepared = _prepared(spec, checkpoint, str(dtype), dummy_weights, registry)
        return prepared.divide(place.size, split, ep)

    plan = place.together(work)
    place.same_on_all_ranks({**plan.fingerprints(registry), "seed of dummy weights": str(seed)})
    source = DummyReader(seed) if dummy_weights else reader
    return place.together(lambda: _load(plan, place, where, registry, source, progress))


def _prepared(
    spec: BoundSpec, checkpoint: str | os.PathLike[str] | None, dtype: str, dummy: bool, registry: Registry
) -> Prepared:
    if not dummy:
        opened = open_checkpoint(locate(checkpoint, spec), registry)
        return prepare(spec, checkpoint=opened, dtype=dtype, registry=registry)
    if checkpoint is not None:
        raise UsageError("dummy weights and a checkpoint exclude each other")
    one = prepare(spec, dtype=dtype, registry=registry).divide(1)
    return prepare(spec, checkpoint=derived_checkpoint(one), dtype=one.dtype, registry=registry)


def _load(
    plan: ModelPlan,
    place: TensorParallel,
    device: torch.device,
    registry: Registry,
    reader: Reader | None,
    progress: Callable[[int, int], None] | None,
) -> Model:
    with AnonymousMemory() as memory:
        model = Model(plan, place, device, registry).eval()
        total = plan.load.checkpoint_bytes(place.rank) if progress else 0
        model.loaded = load_model(
            plan.load,
            place.rank,
            model.sharded_modules,
            reader=reader,
            progress=(lambda done: progress(done, total)) if progress else None,
            memory=memory,
        )
    model.peak_anon_bytes = memory.peak
    return model


def _device(device: torch.device | str | None, place: TensorParallel) -> torch.device:
    if device is None:
        if place.group is None or torch.distributed.get_backend(place.group) != "nccl":
            return torch.get_default_device()
        device = "cuda"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise UsageError(f"device {device!r}: {cause}") from cause
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise UsageError(f"device {device!r}, but torch sees no CUDA device", hint='use device="cpu"')
    return found if ":" in str(found) else torch.device("cuda", torch.cuda.current_device())
