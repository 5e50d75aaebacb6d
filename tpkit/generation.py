"""Decoding with a KV cache: greedy, or sampled when asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist

from tpkit.errors import CheckpointError, UsageError
from tpkit.model import Model

__all__ = ["check_request", "eos_ids", "generate"]


def generate(
    model: Model,
    prompt_ids: list[int],
    *,
    max_new_tokens: int = 64,
    eos: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """Continues a prompt.

    Args:
        model: on every rank of its group, called alike.
        prompt_ids: the prompt's tokens, at least one.
        max_new_tokens: at most this many.
        eos: decoding ends with any of these; it is the last token returned.
        temperature: 0 is greedy; else logits are divided by it and a token is drawn.
        top_p: a token is drawn from the smallest set that has this probability.
        seed: of the drawing.
        on_token: called with every new token.

    Returns:
        the new tokens.

    Raises:
        UsageError: for an empty prompt or numbers that make no sense.
    """
    check_request(prompt_ids, max_new_tokens, temperature, top_p)
    cache = model.new_cache(1, len(prompt_ids) + max_new_tokens)
    draws = torch.Generator().manual_seed(seed)
    new: list[int] = []
    ids = torch.tensor([prompt_ids], dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        while len(new) < max_new_tokens:
            token = _agree(model, _choose(model(ids, cache, last_only=True)[0, -1], temperature, top_p, draws))
            new.append(token)
            if on_token is not None:
                on_token(token)
            if token in eos:
                break
            ids = torch.tensor([[token]], dtype=torch.int64, device=model.device)
    return new


def check_request(prompt_ids: list[int], max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Checks what `generate` is asked for.

    Raises:
        UsageError: for an empty prompt or numbers that make no sense.
    """
    if (
        not prompt_ids
        or max_new_tokens < 1
        or not (temperature == 0 or 1e-3 <= temperature < inf)
        or not 0 < top_p <= 1
    ):
        raise UsageError(
            f"a prompt of {len(prompt_ids)} tokens, {max_new_tokens} new ones, temperature {temperature}, "
            f"top_p {top_p}: at least one token each, temperature 0 or from 0.001, top_p above 0 up to 1"
        )


def _choose(logits: torch.Tensor, temperature: float, top_p: float, draws: torch.Generator) -> int:
    if bool(logits.isnan().any()):
        raise CheckpointError(
            "the logits are not numbers (NaN): a weight is not one, or a value left the range of the dtype",
            hint="compute in float32, and check the checkpoint",
        )
    if temperature == 0:
        return int(logits.argmax())
    chances, order = (logits.float().cpu() / temperature).softmax(-1).sort(descending=True)
    kept = chances.cumsum(-1) - chances < top_p
    return int(order[torch.multinomial(chances * kept, 1, generator=draws)])


def _agree(model: Model, token: int) -> int:
    """Ranks that round differently could choose differently and go separate ways; rank 0 decides."""
    if model.tp.group is None or model.tp.size == 1:
        return token
    chosen = torch.tensor([token], device=model.device)
    dist.broadcast(chosen, group=model.tp.group, group_src=0)
    return int(chosen)


def eos_ids(folder: Path) -> set[int]:
    """Returns the end-of-sequence ids that generation_config.json and config.json of a folder name.

    Raises:
        CheckpointError: if one of the files is not JSON, or names something else.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            said = content.get("eos_token_id")
            if said is None and isinstance(content.get("text_config"), dict):
                said = content["text_config"].get("eos_token_id")
            found.update(int(i) for i in (said if isinstance(said, list) else [] if said is None else [said]))
        except (ValueError, TypeError, AttributeError) as cause:
            raise CheckpointError(f"{file}: no usable eos_token_id: {cause}") from cause
    return found
