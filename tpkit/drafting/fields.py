"""Fields of config.json that a draft reads: found under the names that files use, compared with the tensors' shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tpkit.spec.fields import SPELLINGS

__all__ = ["ALIASES", "Fields", "text_of"]

#: what a size is called in config.json, the likeliest first
ALIASES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab", "num_embeddings"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim", "embed_dim", "n_embed"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim",
                          "inner_dim", "mlp_dim", "mlp_hidden_size", "feedforward_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "n_blocks"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "n_kv_head",
                            "num_query_groups", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "d_head", "d_kv", "head_size", "attention_head_dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "rms_norm_epsilon", "layer_norm_eps", "layer_norm_epsilon",
                     "layernorm_epsilon", "norm_epsilon", "epsilon"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon",
                       "epsilon"),
    "dense_intermediate_size": ("dense_intermediate_size", "intermediate_size_mlp", "dense_ffn_hidden_size"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size",
                              "intermediate_size_moe", "expert_ffn_hidden_size", "expert_dim", "ffn_hidden_size"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                                        "shared_intermediate_size", "share_expert_dim", "shared_expert_dim"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts",
                    "n_experts", "num_moe_experts", "moe_num_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk",
                            "moe_top_k", "moe_k", "num_selected_experts", "n_experts_per_token", "n_activated_experts",
                            "moe_router_topk", "top_k_experts", "router_top_k", "topk", "top_k"),
    "n_group": ("n_group", "n_groups", "num_expert_group", "n_expert_groups"),
    "topk_group": ("topk_group", "topk_groups", "n_limited_groups", "limited_topk"),
    "norm_topk_prob": ("norm_topk_prob", "norm_topk_probs", "norm_expert_weight", "moe_renormalize", "route_norm"),
    "routed_scaling_factor": ("routed_scaling_factor", "moe_router_scaling_factor", "router_scaling_factor",
                              "moe_routed_scaling_factor", "route_scale"),
    "scoring_func": ("scoring_func", "score_func", "score_function", "moe_router_score_function",
                     "moe_router_activation_func", "router_score_function"),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function", "activation", "act_fn", "act"),
}  # fmt: skip

#: fields that change nothing of what a forward computes
_IDLE = re.compile(
    r"_?name_or_path|architectures|model_type|auto_map|transformers_version|(torch_)?dtype|use_cache|.*_token_id|"
    r".*_token_ids|initializer_.*|.*_init.*|.*dropout.*|.*_pdrop|pretraining_tp|quantization_config|output_.*|return_.*|"
    r"problem_type|id2label|label2id|task_specific_params|summary_.*|.*attn_implementation|use_flash_attn|gradient_.*|"
    r"max_position_embeddings|max_length|n_positions|n_ctx|tokenizer_class|bos_token|eos_token|.*_loss.*|vision_config|"
    r"text_config|is_decoder|is_encoder_decoder|.*checkpoint.*|torchscript|chunk_size_feed_forward|.*router_aux.*"
)
_WORD = re.compile(r"[A-Za-z_][\w-]*")


def text_of(value: Any) -> str:
    """Returns a plain value as YAML in one line."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and value not in ("true", "false", "null") else json.dumps(value)
    return json.dumps(value)


class Fields:
    """Declares fields for a draft, and keeps account of what of config.json is read.

    Attributes:
        declared: field -> its declaration in YAML.
        questions: what a person must decide.
        required: flags of config.json that what is guessed depends on.
        derived: name -> what it is derived from, in YAML.
        shown: field -> the value that config.json has for it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.declared: dict[str, str] = {}
        self.questions: list[str] = []
        self.required: list[str] = []
        self.derived: dict[str, str] = {}
        self.shown: dict[str, Any] = {}
        self._read: set[str] = set()

    def ask(self, question: str) -> None:
        """Notes a question, once."""
        if question not in self.questions:
            self.questions.append(question)

    def value(self, name: str) -> Any:
        """Returns what config.json has for a field under any of its names, None for nothing."""
        return next((self.config[key] for key in ALIASES.get(name, (name,)) if self.config.get(key) is not None), None)

    def count(self, name: str, seen: int | None) -> int | None:
        """Returns what config.json has for a size: what is seen, if one of its names says so, else what any says."""
        found = [self.config[key] for key in ALIASES.get(name, (name,)) if _is_count(self.config.get(key))]
        return seen if seen in found else next(iter(found), None)

    def size(self, name: str, seen: int | None, default: str | None = None, expect: int | None = None) -> None:
        """Declares a size.

        Args:
            name: the canonical name.
            seen: what shapes say it is.
            default: an expression that stands for it where config.json has none,
            expect: and what that comes out as; another size that is seen is written as a number.
        """
        keys = [key for key in ALIASES[name] if _is_count(self.config.get(key))]
        key = next((key for key in keys if seen is None or self.config[key] == seen), keys[0] if keys else None)
        if key is not None:
            value = self.config[key]
            if seen not in (None, value):
                self.ask(f"{name}: config.json says {key} {value}, the shapes of tensors say {seen}")
            self.declare(name, key, value)
            alike = [other for other in keys if self.config[other] == value]
            self._read.update(alike)
            if len(alike) > 1:
                self.declared[name] = f"{{from: [{', '.join(alike)}], default: {text_of(value)}}}"
        elif default is not None and (seen is None or expect is None or seen == expect):
            self.declared[name] = default
        else:
            known = f"{seen} by the shapes of tensors" if seen else "1 is a placeholder"
            self.ask(f"{name}: config.json has no such field under a known name ({known})")
            self.declared[name] = str(seen or 1)

    def number(self, name: str, fallback: Any) -> None:
        """Declares a number or a word that shapes do not tell."""
        key = next((key for key in ALIASES.get(name, (name,)) if self.config.get(key) is not None), None)
        if key is None:
            self.ask(f"{name}: not in config.json; {text_of(fallback)} is what most models have")
            self.declared[name] = text_of(fallback)
        else:
            self.declare(name, key, self.config[key])

    def declare(self, name: str, key: str, value: Any) -> None:
        """Declares a field that config.json has under a key; its value becomes the default."""
        self._read.add(key)
        self.shown[name] = value
        self.declared[name] = text_of(value) if key == name else f"{{from: {key}, default: {text_of(value)}}}"

    def spelled(self, name: str, fallback: Any) -> Any:
        """Declares a field whose spellings every description knows (rope); returns its value."""
        found = next((v for key in SPELLINGS[name] if (v := _at(self.config, key)) is not None), None)
        self._read.update(key.partition(".")[0] for key in SPELLINGS[name])
        plain = found is None or isinstance(found, Mapping)
        self.declared[name] = text_of(fallback if plain else found)
        return found

    def bias(self, found: bool, flags: Iterable[str]) -> str:
        """Returns ``bias:`` of a projection: a flag of config.json that says what the tensors show, else a literal."""
        for flag in flags:
            said = self.config.get(flag)
            if isinstance(said, bool):
                self._read.add(flag)
                if said == found:
                    self.declared[flag] = text_of(said)
                    return f"bias: {flag}"
                self.ask(f"config.json says {flag}: {text_of(said)}, but the tensors show {text_of(found)}")
                break
        return "bias: true" if found else ""

    def word(self, name: str, known: type | tuple[type, ...], among: tuple[str, ...] = ()) -> str | None:
        """Declares a field if config.json has it as a value of a type, and one of some words; returns its name."""
        for key in ALIASES.get(name, (name,)):
            said = self.config.get(key)
            if (
                isinstance(said, known)
                and (not isinstance(said, bool) or known is bool)
                and (not among or said in among)
            ):
                self.declare(name, key, said)
                return name
        return None

    def multiplier(self, name: str, what: str) -> str:
        """Declares a number of config.json that multiplies something, by its name, and asks; "" where there is none."""
        if self.word(name, (int, float)) is None:
            return ""
        self.ask(f"{name}: by its name it is taken to multiply {what}")
        return name

    def require(self, flag: str) -> bool:
        """Tells whether config.json sets a flag; then the draft is of models that set it, and says so."""
        if self.config.get(flag) is not True:
            return False
        self.declare(flag, flag, True)
        self.required.append(flag)
        return True

    def unread(self) -> list[str]:
        """Returns what config.json sets and the draft does not read, without what changes no result."""
        return [
            f"{key}: {text_of(value)}"[:80]
            for key, value in self.config.items()
            if key not in self._read and value is not None and not _IDLE.fullmatch(key)
        ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _at(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
