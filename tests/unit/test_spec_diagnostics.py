"""What is wrong with a description is found without a config.json, in one pass, with position, path and suggestion."""

# ruff: noqa: E501  a problem stands beside what causes it

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.spec_common import BASE, bent, described, problems_of, registry
from tpkit.errors import PluginError, SpecError
from tpkit.spec import describe

LAYER = "tree.model.layers"
ATTENTION = f"{LAYER}.self_attn"
QKV = "packs: [q_proj, k_proj, v_proj]"
NORM = "    norm: {norm: rms}"

#: what is changed, to what, and every problem that must be found
CASES: list[tuple[str, str, list[str]]] = [
    # the top level: unknown words are errors
    ("family: small", "famly: small", ["1:1: needs 'family'", "2:1: unknown word 'famly' (did you mean 'family'?)"]),
    ("schema: 1\n", "", ["1:1: needs 'schema'"]),
    ("schema: 1\n", "schema: 2\n", ["1:9: schema: 1 is needed"]),
    ("architectures: [SmallForCausalLM]\n", "", ["1:1: needs 'architectures'"]),
    ("[SmallForCausalLM]", "Small", ["3:16: architectures: input should be a valid list, not text 'Small'"]),
    ("model_type: small", "model_type: smal",
     ["6:3: config.model_type: 'smal' is none of this description's model_types (did you mean 'small'?)"]),
    # fields
    ("  bias: false", "  bias: {form: x}", ["20:10: config.bias: unknown word 'form' (did you mean 'from'?)"]),
    ("  bias: false", "  bias: false\n  left: 3", ["21:3: config.left: is declared, but nothing reads it"]),
    ("config:\n", "config:\n  layer: 3\n",
     ["6:3: config: 'layer' is taken; choose another and give config.json's with 'from'"]),
    ("  num_hidden_layers: 4", "  num_hidden_layer: 4",
     [f"27:15: {LAYER}.repeat: 'num_hidden_layers' is not declared (did you mean 'num_hidden_layer'?)"]),
    ("head_dim: hidden_size // num_attention_heads", "head_dim: head_dim + 1",
     ["13:3: head_dim: is computed from itself: head_dim -> head_dim"]),
    ("  hidden_size: 64", "  hidden_size: sixty_four", ["8:3: config.hidden_size: is an integer, but its default is text"]),
    ("num_key_value_heads: num_attention_heads", "num_key_value_heads: num_attention_head",
     ["12:24: config.num_key_value_heads: 'num_attention_head' is not declared; quote it if it is meant as a word"
      " (did you mean 'num_attention_heads'?)"]),
    ("every: 2", "every: two", ["19:47: config.layer_type.every: 'two' is not declared"]),
    ("tree:\n", "derived: {vocab_size: 3}\ntree:\n", ["23:11: derived.vocab_size: is a field of config already"]),
    ("tree:\n", "require: [bias + 1]\ntree:\n",
     ["23:11: require[0]: a number is needed here, not bias, which is true or false"]),
    # unknown words, modules, styles, norms
    ("module: mlp", "module: mpl",
     [f"39:17: {LAYER}.mlp.module: no module 'mpl' (did you mean 'mlp'?); installed: attention, embedding, mlp, moe; "
      "another one is a plugin that has to be installed"]),
    ("{style: row}", "{style: rwo}",
     [f"36:25: {ATTENTION}.o_proj.style: no style 'rwo' (did you mean 'row'?); "
      "installed: column, merged_column, qkv, replicated, row, vocab"]),
    ("{style: row}", "{stlye: row}",
     [f"36:18: {ATTENTION}.o_proj: unknown word 'stlye' of a container (did you mean 'style'?)"]),
    ("{norm: rms}", "{norm: rns}", [f"29:31: {LAYER}.input_layernorm.norm: no norm 'rns' (did you mean 'rms'?); known: layer, rms"]),
    ("{norm: rms}", "{nrom: rms}",
     [f"29:25: {LAYER}.input_layernorm: unknown word 'nrom' of a container (did you mean 'norm'?)"]),
    ("{style: row}", "{style: row, bais: true}",
     [f"36:30: {ATTENTION}.o_proj: unknown word 'bais' of a projection (did you mean 'bias'?)"]),
    ("rope: {pairs: half}", "rope: {pairs: half, partail: 0.5}",
     [f"32:29: {ATTENTION}.rope: unknown word 'partail' (did you mean 'partial'?)"]),
    (NORM, "    norm: rms", ["43:5: tree.model: unknown word 'norm' of a container; a child is a mapping"]),
    (NORM, "    norm: {}",
     ["43:11: tree.model.norm: has nothing in it: it needs children, or module, parameter, style or norm"]),
    # values
    ("pairs: half", "pairs: hlaf",
     [f"32:23: {ATTENTION}.rope.pairs: 'hlaf' is not one of: half, interleaved (did you mean 'half'?)"]),
    ("rope: {pairs: half}", "rope: {theta: rope_theta}", [f"32:15: {ATTENTION}.rope: needs 'pairs': one of: half, interleaved"]),
    ("bias: bias", "bias: baias", [f"34:71: {ATTENTION}.qkv_proj.bias: 'baias' is not declared (did you mean 'bias'?)"]),
    ("bias: bias", "bias: bias and 3 + bias",
     [f"34:84: {ATTENTION}.qkv_proj.bias: a number is needed here, not bias, which is true or false"]),
    ("{style: row}", "{style: row, bias: 3}", [f"36:36: {ATTENTION}.o_proj.bias: true or false is needed, not 3"]),
    ("{style: row}", "{style: row, bias: no}", [f"36:36: {ATTENTION}.o_proj.bias: true or false is needed, not no"]),
    ("{style: row}", "{style: row, bias: hidden_size}",
     [f"36:36: {ATTENTION}.o_proj.bias: true or false is needed, but hidden_size is an integer"]),
    ("repeat: num_hidden_layers", "repeat: hidden_size / 2",
     [f"27:15: {LAYER}.repeat: a positive integer is needed, but this gives a number with a fraction"]),
    ("repeat: num_hidden_layers", "repeat: 0", [f"27:15: {LAYER}.repeat: a positive integer is needed, not 0"]),
    ("repeat: num_hidden_layers", "repeat: hidden_size //",
     [f"27:29: {LAYER}.repeat: a value is missing before the end, in 'hidden_size //'"]),
    ("activation: hidden_act", "activation: hiden_act",
     [f"40:21: {LAYER}.mlp.activation: 'hiden_act' is not one of: child, gelu, gelu_fast, gelu_new, gelu_pytorch_tanh, linear, mish, quick_gelu, relu, "
      "relu2, relu6, silu, swish, tanh "
      "(did you mean 'hidden_act'?)"]),
    # conditions
    ("'sliding_attention', is", "'slidng_attention', is",
     [f"33:64: {ATTENTION}.window.when: layer_type is never 'slidng_attention' (did you mean 'sliding_attention'?); "
      "it is one of: full_attention, sliding_attention"]),
    ("'wide'", "'wied'",
     [f"33:39: {ATTENTION}.window.when: model_type is never 'wied' (did you mean 'wide'?); it is one of: small, wide"]),
    ("and layer_type", "and layer_typ",
     [f"33:49: {ATTENTION}.window.when: 'layer_typ' is not declared (did you mean 'layer_type'?)"]),
    ("is: sliding_window}", "si: sliding_window}",
     ["18:3: config.sliding_window: is declared, but nothing reads it",
      f"33:17: {ATTENTION}.window: a case says what the value 'is'",
      f"33:84: {ATTENTION}.window: unknown word 'si'; a case has 'when' and 'is'"]),
    (NORM, "    norm: {norm: rms, size: layer}", ["43:29: tree.model.norm.size: there is no layer outside of a repeat"]),
    (NORM, "    norm: {norm: rms, when: layer_type == 'full_attention'}",
     ["43:29: tree.model.norm.when: 'layer_type' differs by layer, and there is none outside of a repeat"]),
    # roles
    ("        o_proj: {style: row}\n", "",
     [f"31:9: {ATTENTION}: module 'attention' needs a child for its role 'o_proj' of style row"]),
    ("        o_proj: {style: row}\n", "        o_proj: {style: row}\n        p_proj: {style: row}\n",
     [f"31:9: {ATTENTION}: the role 'o_proj' of module 'attention' is filled 2 times: o_proj, p_proj"]),
    ("q_norm: {norm: rms, over: head}", "query_norm: {norm: rms, over: head}",
     [f"35:9: {ATTENTION}.query_norm: module 'attention' has no role for 'query_norm' (did you mean 'q_norm'?); "
      "its roles: qkv_proj, o_proj, q_norm, k_norm, v_norm, sinks"]),
    ("q_norm: {norm: rms, over: head}", "q_norm: {style: row}",
     [f"35:17: {ATTENTION}.q_norm: the role 'q_norm' of module 'attention' takes a norm or a parameter, not a projection"]),
    ("o_proj: {style: row}", "o_proj: {style: column}",
     [f"36:17: {ATTENTION}.o_proj: the role 'o_proj' of module 'attention' takes style row, not style 'column'"]),
    (NORM, "    norm: {norm: rms, role: q_norm}", ["43:29: tree.model.norm.role: only children of a module have roles"]),
    (NORM, "    norm: {norm: rms, over: head}",
     ["43:29: tree.model.norm.over: only a norm in a module goes over something of the module's"]),
    ("over: head", "over: haed",
     [f"35:35: {ATTENTION}.q_norm.over: 'haed' is not known (did you mean 'head'?); the module around it offers: all_heads, head"]),
    (NORM, "    norm: {style: column}",
     ["43:11: tree.model.norm: style 'column' needs a module around it that says how large it is, or "
      "in_features and out_features"]),
    # what is packed
    (QKV, "packs: [q_proj, k_proj]", [f"34:39: {ATTENTION}.qkv_proj.packs: 2 parts, but style 'qkv' has at least 3"]),
    (QKV, "packs: [q_proj, k_proj, v_proj, g_proj]",
     [f"34:39: {ATTENTION}.qkv_proj.packs: 4 parts, but the module makes 3: q, k, v (style 'qkv')"]),
    (QKV, "packs: [q_proj, k_proj, k_proj]",
     [f"34:39: {ATTENTION}.qkv_proj.packs: 'k_proj' is packed twice, not ['q_proj', 'k_proj', 'k_proj']"]),
    (QKV, "fused: [q, k, w]",
     [f"34:39: {ATTENTION}.qkv_proj.fused: 'w' is no part of it; its parts are: q, k, v"]),
    (QKV, "fused: {per: hed, order: [q, k, v]}",
     [f"34:39: {ATTENTION}.qkv_proj.fused: per is one of: head, kv_head, channel "
      "(did you mean 'head'?)"]),
    (QKV + ", ", "",
     [f"34:27: {ATTENTION}.qkv_proj: style 'qkv' is made of 3 parts: say how they are stored, with packs or fused"]),
    (QKV, QKV + ", fused: [q, k, v]",
     [f"34:39: {ATTENTION}.qkv_proj: is stored apart (packs) or as one tensor (fused), not both"]),
    ("{style: row}", "{style: row, packs: [a]}", [f"36:37: {ATTENTION}.o_proj.packs: style 'row' is not made of parts"]),
    # forward
    ("x + mlp(", "x + mpl(",
     [f"28:56: {LAYER}.forward[1]: there is no child 'mpl' (did you mean 'mlp'?)",
      f"38:7: {LAYER}.mlp: no step of forward uses it (did you mean 'mpl'?)"]),
    ("mlp(post_attention_layernorm(x))", "mlp(x)", [f"37:7: {LAYER}.post_attention_layernorm: no step of forward uses it"]),
    ("x + mlp(", "scale * x + mlp(", [f"28:52: {LAYER}.forward[1]: 'scale' is not declared"]),
    # ties and ignored tensors
    ("to: model.embed_tokens", "to: model.embed_token",
     ["44:33: tree.lm_head.tied.to: no embedding 'model.embed_token' (did you mean 'model.embed_tokens'?); "
      "there is: model.embed_tokens"]),
    ("[model.layers.*.self_attn.rotary_emb.inv_freq]", "[model.layers.*.mlp.**]",
     ["22:10: ignore[0]: 'model.layers.*.mlp.**' covers model.layers.*.mlp.gate_proj.weight, a declared parameter; "
      "make it narrower"]),
    ("[model.layers.*.self_attn.rotary_emb.inv_freq]", "['model.{num_hidden_layrs}.x', a..b]",
     ["22:10: ignore[0]: 'num_hidden_layrs' is not declared (did you mean 'num_hidden_layers'?)",
      "22:40: ignore[1]: '' is no component of a name; use a word, *, ** or {expression}"]),
    ("[model.layers.*.self_attn.rotary_emb.inv_freq]", "[model.layers.7.self_attn.q_norm.weight]",
     ["22:10: ignore[0]: 'model.layers.7.self_attn.q_norm.weight' covers model.layers.*.self_attn.q_norm.weight, "
      "a declared parameter; make it narrower"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "wanted"), CASES)
def test_found(old: str, new: str, wanted: list[str], tmp_path: Path) -> None:
    assert problems_of(bent((old, new)), tmp_path) == [f"d.yaml:{line}" for line in wanted]


def test_the_small_description_is_right(tmp_path: Path) -> None:
    assert described(BASE, tmp_path).header.family == "small"


def test_all_problems_come_at_once_in_order(tmp_path: Path) -> None:
    changes = [("family: small", "famly: small"), ("module: mlp", "module: mpl"), ("pairs: half", "pairs: hlaf"),
               ("to: model.embed_tokens", "to: model.embed_token"), ("over: head", "over: head, epz: 1")]  # fmt: skip
    found = problems_of(bent(*changes), tmp_path)
    lines = [int(line.split(":")[1]) for line in found]
    assert lines == sorted(lines)
    assert {1, 2, 32, 35, 39, 44} <= set(lines)


def test_branches_not_taken_are_checked(tmp_path: Path) -> None:
    text = bent(
        ("        activation: hidden_act\n", "        activation: [{when: bias, is: hiden_act}, {is: hidden_act}]\n")
    )
    assert any("'hiden_act' is not one of" in line for line in problems_of(text, tmp_path))
    mlp = BASE[BASE.index("      mlp:\n") : BASE.index(NORM)]
    choice = """      mlp:
        - {when: bias, module: mlp, activation: silu, up: {style: column}, down: {style: row, pack: [a]}}
        - {module: mlp, activation: hidden_act, up: {style: column}, down: {style: row}}
"""
    (problem,) = problems_of(bent((mlp, choice)), tmp_path)
    assert problem.startswith(f"d.yaml:39:95: {LAYER}.mlp[0].down: unknown word 'pack'")
    assert "did you mean 'packs'?" in problem


def test_a_branch_that_always_holds_hides_the_rest(tmp_path: Path) -> None:
    text = bent(("activation: hidden_act", "activation: [{is: hidden_act}, {is: silu}]"))
    assert any("this case always holds" in line for line in problems_of(text, tmp_path))


def test_another_schema_is_not_looked_into(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is written in schema 7; this tpkit reads schema 1"):
        described("schema: 7\nanything: else\n", tmp_path)


def test_a_dict_has_paths_alone() -> None:
    with pytest.raises(SpecError) as caught:
        describe({"schema": 1, "family": "f", "architectures": ["A"], "config": {}, "tree": {"a": {"norm": "rns"}}},
                 registry=registry())  # fmt: skip
    assert caught.value.problems == (
        "description: tree.a.norm: no norm 'rns' (did you mean 'rms'?); known: layer, rms",
    )


def test_a_plugin_that_does_not_import_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from tpkit.registry import Plugin, Registry

    (tmp_path / "broken_mixer.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint(name="mixer", value="broken_mixer:Mixer", group="tpkit.modules")
    broken = Plugin(
        kind="module", name="mixer", value=point.value, distribution="mixer-dist", version="1", entry_point=point
    )
    known = Registry((*registry().listing(), broken))
    described(BASE, tmp_path, known)  # nobody asks for it
    with pytest.raises(PluginError, match=r"mixer-dist 1 .*not_there_at_all"):
        described(bent(("module: mlp", "module: mixer")), tmp_path, known)
    assert "broken_mixer" not in sys.modules


def test_not_a_description(tmp_path: Path) -> None:
    for text in ("[1, 2]", "word", "3"):
        with pytest.raises(SpecError, match="a description is a mapping"):
            described(text, tmp_path)
