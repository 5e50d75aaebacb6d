"""What config.json tells of how experts are chosen and weighed, and the questions that it leaves."""

from __future__ import annotations

from tpkit.drafting.fields import Fields
from tpkit.drafting.parts import flow

__all__ = ["routing_words"]


def routing_words(fields: Fields, correction: str, router: str) -> str:
    """Returns ``routing:``.

    Args:
        fields: takes what is read, and the questions.
        correction: the path of a number for each expert that is added where experts are chosen; "": there is none.
        router: the path of the router in the module.
    """
    score = fields.word("scoring_func", str, ("softmax", "sigmoid"))
    if score is None:
        score = "sigmoid" if correction else "softmax"
        fields.ask(
            f"routing: what do the router's logits become before experts are chosen: softmax, sigmoid, or none? "
            f"config.json does not say it in a known word; {score} is guessed"
        )
    fields.ask(
        "routing: are the chosen experts weighed by these scores, as is guessed, or by the softmax or sigmoid of the "
        "chosen ones alone (`score: none, weights: softmax`)?"
    )
    fields.ask("routing: a weight multiplies what its expert gives; or does it what that takes (`apply_to: input`)?")
    fields.size("num_experts_per_tok", None)
    said = [f"score: {score}", "top_k: num_experts_per_tok"]
    renormalize = fields.word("norm_topk_prob", bool)
    if renormalize is None:
        fields.ask(
            "routing: are the weights of the chosen experts divided by their sum? `renormalize: true` is guessed"
        )
    said.append(f"renormalize: {renormalize or 'true'}")
    if fields.count("n_group", None) and fields.count("topk_group", None):
        fields.size("n_group", None)
        fields.size("topk_group", None)
        best = "top2_sum" if correction else "max"
        said += ["groups: n_group", "top_groups: topk_group", f"group_score: {best}"]
        fields.ask(f"routing: is a group of experts ranked by its best score, or by the sum of two? {best} is guessed")
    if fields.word("routed_scaling_factor", (int, float)) is not None:
        said.append("scale: routed_scaling_factor")
        fields.ask("routing: are weights multiplied by routed_scaling_factor, renormalised or not? Yes is guessed")
    if correction:
        fields.ask(
            f"correction bias: {correction} is taken for one. Guessed: it counts where experts are chosen, not in "
            "their weights, and is held in float32"
        )
    if router:
        fields.ask(f"router: does {router} multiply in float32 (`compute: float32`)? In the model's dtype is guessed")
    return flow(*said)
