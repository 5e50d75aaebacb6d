"""The shipped descriptions: defaults, real config.json files, speed, and what happens to a typo in them."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.spec_common import DESCRIPTIONS, NAMES, REAL_CONFIGS, REPOSITORY, described, registry
from tpkit.errors import SpecError
from tpkit.spec import BoundSpec, describe, load_spec

real = pytest.mark.skipif(not REAL_CONFIGS.is_dir(), reason="the folder of real config.json files is not here")

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


def load(name: str, config: Any = None, **overrides: Any) -> BoundSpec:
    return load_spec(name, config=config, overrides=overrides, registry=registry())


def first(spec: BoundSpec, word: str, layer: int = 0) -> Any:
    start = f"model.layers.{layer}."
    return next(node.options for node in spec.root.walk() if node.word == word and node.path.startswith(start))


@pytest.mark.parametrize("name", NAMES)
def test_a_description_fits_on_a_screen(name: str) -> None:
    lines = (DESCRIPTIONS / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 120
    assert describe(name, registry=registry()).header.checkpoint


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[name])()
    description, ours = describe(name, registry=registry()), load(name).values
    for field in set(description.declarations.fields) - {"rope_theta", "rope_scaling", "layer_type", "sliding_window"}:
        wanted = getattr(theirs, field, None)
        if field == "head_dim" and wanted is None:
            wanted = theirs.hidden_size // theirs.num_attention_heads
        assert ours[field] == wanted, field
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_type"] == "default"


def test_smollm2() -> None:
    spec = load("llama.yaml", SMOLLM2)
    attention = first(spec, "attention")
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.window) == (9, 3, 64, None)
    assert attention.rope.theta == 100000
    assert first(spec, "mlp").width == 1536
    assert next(node for node in spec.root.walk() if node.path == "lm_head").options.tied.to == "model.embed_tokens"
    assert spec.checkpoint == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_window_is_mistrals() -> None:
    assert first(load("mistral", {"model_type": "mistral"}), "attention").window == 4096
    assert first(load("mistral", {"model_type": "mistral", "sliding_window": None}), "attention").window is None
    assert first(load("llama", {"model_type": "llama", "sliding_window": 4096}), "attention").window is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwens_window_is_in_its_upper_layers(name: str) -> None:
    config = {"num_hidden_layers": 4, "max_window_layers": 3, "sliding_window": 16, "use_sliding_window": True}

    def windows(**more: Any) -> list[int | None]:
        spec = load(name, {**config, **more})
        return [first(spec, "attention", layer).window for layer in range(4)]

    assert windows() == [None, None, None, 16]
    assert windows(use_sliding_window=False) == [None] * 4
    assert windows(layer_types=["sliding_attention", *["full_attention"] * 3]) == [16, None, None, None]


@real
@pytest.mark.parametrize(
    ("folder", "name", "heads", "width", "layers"),
    [
        ("Qwen--Qwen3-0.6B", "qwen3", (16, 8, 128), 3072, 28),
        ("Qwen--Qwen3-1.7B", "qwen3", (16, 8, 128), 6144, 28),
        ("Qwen--Qwen3-8B", "qwen3", (32, 8, 128), 12288, 36),
        ("Qwen--Qwen3-32B", "qwen3", (64, 8, 128), 25600, 64),
        ("Qwen--Qwen2.5-7B-Instruct", "qwen2", (28, 4, 128), 18944, 28),
        ("Devstral-Small-2507", "mistral", (32, 8, 128), 32768, 40),
        ("granite-3b-code-instruct-128k", "llama", (32, 32, 80), 10240, 32),
    ],
)
def test_real_configs(folder: str, name: str, heads: tuple[int, int, int], width: int, layers: int) -> None:
    spec = load(name, REAL_CONFIGS / folder)
    attention = first(spec, "attention", layers - 1)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == heads
    assert attention.window is None
    assert first(spec, "mlp", layers - 1).width == width
    biased = {node.path.rpartition(".")[2] for node in spec.root.walk() if getattr(node.options, "bias", False)}
    assert biased == {
        "qwen2": {"qkv_proj"},
        "llama": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} if "granite" in folder else set(),
    }.get(name, set())


@real
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen--Qwen3-0.6B", "llama"),
        ("microsoft--phi-4", "llama"),
        ("Qwen--Qwen3-30B-A3B", "qwen3"),
        ("SmolLM3-3B", "llama"),
    ],
)
def test_another_familys_config_is_refused(folder: str, name: str) -> None:
    with pytest.raises(SpecError, match="this description is of"):
        load(name, REAL_CONFIGS / folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_speed(name: str) -> None:
    load(name)
    best = min(_timed(lambda: load(name, {"num_hidden_layers": 64})) for _ in range(5))
    assert best < 0.15


def _timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_torch_is_not_imported() -> None:
    program = (
        "import sys\nfrom tests.unit.spec_common import registry\nfrom tpkit.spec import load_spec\n"
        "load_spec('llama', registry=registry())\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_a_fingerprint_is_the_same_everywhere() -> None:
    spec = load("llama", SMOLLM2)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.fingerprint == spec.fingerprint == load("llama", {**SMOLLM2, "use_cache": True}).fingerprint
    program = (
        "from tests.unit.spec_common import registry\nfrom tpkit.spec import load_spec\n"
        f"print(load_spec('llama', config={SMOLLM2!r}, registry=registry()).fingerprint)"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == spec.fingerprint


def test_a_fingerprint_tells_models_apart() -> None:
    changes: list[dict[str, Any]] = [
        {"config.num_hidden_layers": 2},
        {"config.rope_theta": 7.0},
        {"config.attention_bias": True},
        {"tree.lm_head.disable_tp": True},
        {"ignore": []},
        {"tree.model.layers.self_attn.rope.pairs": "interleaved"},
    ]
    found = {load("llama", SMOLLM2, **change).fingerprint for change in [{}, *changes]}
    assert len(found) == 1 + len(changes)


#: what only a checkpoint or a model hub can tell: names of tensors and modules, identities, and words of other programs
UNKNOWABLE = re.compile(
    r"^(schema|family|architectures|model_types|checkpoint|ignore):|packs|^#|layer_types|full_attention|silu|"
    r"^  (model|lm_head):|^    (layers|norm):|(qkv|o|gate_up|down)_proj:"
)


@pytest.mark.parametrize("name", NAMES)
def test_typos_are_caught(name: str, tmp_path: Path) -> None:
    """Damages every word in turn; what is missed must be a word that nothing here can know."""
    text = (DESCRIPTIONS / f"{name}.yaml").read_text()
    code = re.sub(r"#.*", lambda comment: " " * len(comment[0]), text)
    tried, missed = 0, []
    for found in re.finditer(r"[A-Za-z_]\w{2,}", code):
        word = found[0]
        damaged = f"{word[:-2]}{word[-1]}{word[-2]}" if word[-1] != word[-2] else word[:-1]
        tried += 1
        try:
            described(text[: found.start()] + damaged + text[found.end() :], tmp_path)
        except SpecError as error:
            assert all(re.match(r"\S+:\d+:\d+: ", line) for line in error.problems)
        else:
            line = text.count("\n", 0, found.start())
            missed.append((line + 1, word, text.splitlines()[line]))
    assert tried > 110
    assert len(missed) / tried < 0.25
    assert [(number, word) for number, word, line in missed if not UNKNOWABLE.search(line)] == []


def test_the_families_are_listed_in_the_docs() -> None:
    listed = (DESCRIPTIONS.parent / "docs/families.md").read_text(encoding="utf-8")
    for file in sorted(DESCRIPTIONS.glob("*.yaml")):
        lines = len(file.read_text(encoding="utf-8").splitlines())
        (row,) = [line for line in listed.splitlines() if line.startswith(f"| {file.stem} |")]
        assert f"| {lines} |" in row, f"{file.stem} has {lines} lines now: write docs/families.md anew"
