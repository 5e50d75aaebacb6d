"""Faults of finding plugins, of ranks that have other ones, and of words of quantisation that mean nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkit
from tests.quant.formats import FORMATS, encode_all
from tests.quant.methods import Rows, quantised
from tests.ranks import Ranks
from tests.small import description, plan, weights, write
from tpkit.cli import plugins as command
from tpkit.errors import PluginError, RankError, SpecError
from tpkit.registry import Registry, _scan

Scan = Callable[..., Registry]


@pytest.fixture
def scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scan:
    """Returns the registry of what is installed, with folders of ``(distribution, version, entry points)`` before it.

    Each is a folder on the path with a dist-info of its own; the first given is found first.
    """

    def scanned(*found: tuple[str, str, dict[str, str]], code: str = "") -> Registry:
        for number, (name, version, points) in reversed(list(enumerate(found))):
            folder = tmp_path / f"site{number}"
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            lines = "".join(f"{key} = {value}\n" for key, value in points.items())
            (info / "entry_points.txt").write_text(f"[tpkit.quant_methods]\n{lines}" if points else "")
            if code and number == 0:
                (folder / "fault_plugin.py").write_text(code)
            monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "fault_plugin", raising=False)
        return Registry(tuple(_scan()))

    return scanned


GOOD = "from tpkit.quant import Unquantized\nclass MyQ(Unquantized): pass\nclass Other: pass\n"


def planned(folder: Path, registry: Registry, quant: Any = None, overrides: Any = None) -> Any:
    spec = tpkit.load_spec("llama", config=folder, quant=quant, overrides=overrides, registry=registry)
    return tpkit.plan_model(spec, ranks=2, checkpoint=tpkit.open_checkpoint(folder, registry), registry=registry)


# found or not ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"quant": "myq"},
        {"overrides": {"quant": {"method": "myq"}}},
        {"overrides": {"tree.model.layers.mlp.down_proj.quant": "myq"}},
    ],
    ids=["flag", "description", "module"],
)
def test_a_plugin_that_is_named_and_not_found_is_an_error_with_what_is_found(
    how: dict[str, Any], scan: Scan, tmp_path: Path
) -> None:
    registry = scan(("near-dist", "2.1", {"my-q": "fault_plugin:MyQ"}), code=GOOD)
    with pytest.raises(
        PluginError, match=r"no quant method named 'myq' is installed \(did you mean 'my-q'\?\)"
    ) as caught:
        planned(write(tmp_path / "m"), registry, **how)
    said = str(caught.value)
    assert "my-q (near-dist 2.1)" in said and "gptq (tpkit-gptq" in said and "tpkit.quant_methods" in said
    assert "fault_plugin" not in sys.modules


def test_a_leftover_of_a_distribution_that_offers_nothing_hides_no_plugin(scan: Scan, tmp_path: Path) -> None:
    registry = scan(("myq-dist", "2.0", {}), ("MyQ_dist", "1.0", {"myq": "fault_plugin:MyQ"}), code=GOOD)
    assert registry.find("quant method", "myq").version == "1.0"
    assert planned(write(tmp_path / "m"), registry, "myq").planned["lm_head"].choice.name == "none"


TWO_COPIES = [("myq-dist", "3.0", {"newq": "fault_plugin:MyQ"}), ("MyQ_dist", "1.0", {"myq": "fault_plugin:MyQ"})]


def test_of_two_copies_of_a_distribution_the_first_counts(scan: Scan) -> None:
    registry = scan(*TWO_COPIES, code=GOOD)
    assert registry.load("quant method", "newq").__name__ == "MyQ"
    with pytest.raises(PluginError, match=r"no quant method named 'myq'.*newq \(myq-dist 3\.0\)"):
        registry.find("quant method", "myq")


def test_a_name_that_only_a_hidden_copy_offers_is_told_with_both_places(scan: Scan, tmp_path: Path) -> None:
    registry = scan(*TWO_COPIES)
    with pytest.raises(PluginError) as caught:
        registry.find("quant method", "myq")
    assert str(tmp_path / "site0") in str(caught.value) and str(tmp_path / "site1") in str(caught.value)


@pytest.mark.parametrize("order", [1, -1])
def test_two_providers_of_one_name_are_an_error_that_no_order_decides(order: int, scan: Scan, tmp_path: Path) -> None:
    vendors = [("vendor-one", "1.5", {"awq": "fault_plugin:MyQ"}), ("vendor-two", "2", {"awq": "fault_plugin:Other"})]
    registry, folder = scan(*vendors[::order], code=GOOD), write(tmp_path / "m")
    with pytest.raises(
        PluginError, match=r"'awq' is offered by 3 plugins: tpkit-awq .*, vendor-one 1\.5 .*, vendor-two 2 "
    ):
        planned(folder, registry, "awq")
    assert planned(folder, registry, "online_int8")  # nobody asks for the name
    for chosen in ("awq@vendor-one", "awq@Vendor_One"):
        assert registry.load("quant method", chosen).__module__ == "fault_plugin"
    key = "tree.model.layers.mlp.down_proj.quant"
    plan = planned(folder, registry, overrides={key: "awq@vendor-one"})
    assert plan.planned["model.layers.0.mlp.down_proj"].choice.name == "awq@vendor-one"
    assert "vendor-one 1.5" in plan.fingerprints(registry)["plugins"]
    with pytest.raises(
        PluginError, match=r"'vendor-six' offers no quant method named 'awq'; found: .*awq \(vendor-two 2\)"
    ):
        planned(folder, registry, "awq@vendor-six")


def test_two_providers_of_the_method_that_config_json_names_are_an_error(scan: Scan, tmp_path: Path) -> None:
    registry = scan(("vendor-one", "1", {"awq": "fault_plugin:MyQ"}), code=GOOD)
    with pytest.raises(PluginError, match=r"'awq' is offered by 2 plugins") as caught:
        planned(write(tmp_path / "m", quantization_config={"quant_method": "awq"}), registry)
    assert "name one of them as awq@tpkit-awq" in (caught.value.hint or "")


def test_a_provider_can_be_chosen_for_the_method_that_config_json_names(scan: Scan, tmp_path: Path) -> None:
    """What the error's hint says must help."""
    registry = scan(("vendor-one", "1", {"awq": "fault_plugin:MyQ"}), code=GOOD)
    folder = write(tmp_path / "m", quantization_config={"quant_method": "awq"})
    plan = planned(folder, registry, "awq@vendor-one")
    assert plan.planned["model.layers.0.mlp.down_proj"].choice.name == "awq@vendor-one"


# broken ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import not_there_at_all", ModuleNotFoundError),
        ("raise ImportError('needs libfoo')", ImportError),
        ("1/0", ZeroDivisionError),
        ("raise SystemExit(3)", SystemExit),
        ("class Other: pass", AttributeError),
    ],
)
def test_a_plugin_that_does_not_import_fails_where_it_is_used_alone(
    code: str, cause: type[BaseException], scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    registry = scan(("broken-dist", "0.3", {"myq": "fault_plugin:MyQ"}), code=code)
    folder = write(tmp_path / "m")
    with pytest.raises(PluginError, match=r"'myq' of broken-dist 0\.3 \(entry point fault_plugin:MyQ\)") as caught:
        planned(folder, registry, "myq")
    assert isinstance(caught.value.__cause__, cause) and cause.__name__ in str(caught.value)
    assert planned(folder, registry, "online_int8").planned["model.layers.0.mlp.down_proj"].choice.name == "online_int8"
    monkeypatch.setattr(Registry, "default", lambda: registry)
    assert command.run(type("Args", (), {"json": False})()) == 0
    assert re.search(r"  myq +broken-dist 0\.3  fault_plugin:MyQ\n", capsys.readouterr().out)
    assert command.run(type("Args", (), {"json": False, "check": True})()) == 3
    assert re.search(r"  myq .*\n    broken: .*does not import", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class MyQ: pass", "'myq' is <class 'fault_plugin.MyQ'>, not a subclass of tpkit.QuantMethod"),
        ("MyQ = 3", "'myq' is 3, not a subclass"),
        (GOOD + "MyQ.api = 9", "'myq' of odd-dist 1 is written for plugin api 9, this tpkit has 1"),
    ],
)
def test_an_entry_point_that_is_no_quant_method_of_this_contract(
    code: str, said: str, scan: Scan, tmp_path: Path
) -> None:
    registry = scan(("odd-dist", "1", {"myq": "fault_plugin:MyQ"}), code=code)
    with pytest.raises(PluginError) as caught:
        planned(write(tmp_path / "m"), registry, "myq")
    assert said in str(caught.value)


# ranks ----------------------------------------------------------------------------------------------------------------


class Halved(Rows):
    """Stores what `Rows` stores, and means something else by it."""

    def dequantize(self, layer: Any) -> torch.Tensor:
        return super().dequantize(layer) / 2


def build(folder: Path, kinds: list[type[Rows] | None]) -> int:
    registry, kind = Registry.default().copy(), kinds[dist.get_rank()]
    if kind is not None:
        registry.register("quant method", "myq", kind)
    spec = tpkit.load_spec("llama", config=folder, quant="myq", registry=registry)
    return tpkit.build(spec, checkpoint=folder, registry=registry).param_bytes()


def test_a_plugin_that_only_some_ranks_know_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    folder = write(tmp_path, quantised())
    for kinds in ([Rows, None], [None, Rows]):
        without = kinds.index(None)
        for rank, error in enumerate(ranks(len(kinds)).outcomes(build, folder, kinds)):
            said = str(error)
            assert "no quant method named 'myq' is installed" in said
            if rank == without:
                assert isinstance(error, PluginError)
            else:
                assert isinstance(error, RankError) and f"rank {without} failed: PluginError" in said
    assert len(ranks(2).run(build, folder, [Rows, Rows])) == 2


def test_ranks_with_other_plugins_of_one_name_are_told(ranks: Ranks, tmp_path: Path) -> None:
    folder = write(tmp_path, quantised())
    for error in ranks(2).outcomes(build, folder, [Rows, Halved]):
        assert isinstance(error, RankError), "one rank halves its weights and nobody notices"
        assert "rank 1: plugins" in str(error)


def test_a_name_is_registered_once(tmp_path: Path) -> None:
    registry = Registry.default().copy()
    registry.register("quant method", "myq", Rows)
    for name, owner in (("myq", "this program"), ("fp8", "tpkit-fp8")):
        with pytest.raises(PluginError, match=f"'{name}' is already offered by {owner}"):
            registry.register("quant method", name, Halved)
    with pytest.raises(PluginError, match=r"unknown kind of plugin 'quant_method'.*did you mean 'quant method'"):
        registry.register("quant_method", "other", Rows)
    assert "myq" not in Registry.default().names("quant method")


# words and rules ------------------------------------------------------------------------------------------------------

UNKNOWN: list[tuple[Any, str]] = [
    ({"method": "gptq", "grup_size": 32}, "grup_size"),
    ({"method": "fp8", "weight_block": [32, 32]}, "weight_block"),
    ({"method": "gptq", "dynamic": {"+:.*q_proj": {"bit": 8}}}, "bit"),
    ({"method": "online_int8", "ingore": ["lm_head"]}, "ingore"),
]


@pytest.mark.parametrize(("said", "key"), UNKNOWN)
@pytest.mark.parametrize("path", ["quant", "tree.model.layers.mlp.down_proj.quant"])
def test_an_option_that_no_method_knows_is_refused_with_its_place(
    path: str, said: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(
        PluginError, match=rf"{said['method']}.*tpkit-.* does not take the options of .*quant: .*{key}: "
    ):
        plan(write(tmp_path), overrides={path: said})


def test_an_option_that_no_method_knows_is_refused_with_the_nearest(tmp_path: Path) -> None:
    for said, nearest in ((UNKNOWN[0][0], "group_size"), (UNKNOWN[3][0], "ignore")):
        with pytest.raises(PluginError, match=f"did you mean '{nearest}'"):
            plan(write(tmp_path), overrides={"quant": said})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tree.model.layers.self_attn.q_prj", r"self_attn has no 'q_prj' \(did you mean 'qkv_proj'\?\)"),
        ("tree.model.layers.5.mlp.down_proj", "tree.model.layers has no '5'"),
        ("tree.model.norm", "tree.model.norm: unknown word 'quant' of a norm"),
        ("tree.model.layers.mlp", "mlp: unknown word 'quant' of a module"),
    ],
)
def test_a_method_for_a_place_that_has_no_weight_is_refused(path: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        plan(write(tmp_path), overrides={f"{path}.quant": "online_int8"})


def test_a_misspelt_word_for_the_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"quant: options \['metod'\] without a method"):
        plan(write(tmp_path), overrides={"quant": {"metod": "gptq"}})
    with pytest.raises(SpecError, match=r"qant.*did you mean 'quant'"):
        plan(write(tmp_path), source=description(qant="gptq"))


def test_a_foreign_list_may_name_modules_that_are_not_there(tmp_path: Path) -> None:
    """One quantiser's list serves many models. What it leaves out here is told by the tensors."""
    said = {"quant_method": "fp8", "modules_to_not_convert": ["visual", "mlp.gate", "lm_head"]}
    with pytest.raises(SpecError, match="no module gets it"):
        plan(write(tmp_path, quantization_config=said))


def test_a_list_of_the_description_that_names_nothing_is_told(tmp_path: Path) -> None:
    """Quantising while loading, no tensor can tell that the list was meant otherwise."""
    with pytest.raises(tpkit.TpkitError, match="q_prj"):
        plan(write(tmp_path), overrides={"quant": {"method": "online_int8", "ignore": ["q_prj"]}})


def test_the_config_beside_the_weights_is_heard_too(tmp_path: Path) -> None:
    """Zero points less one, or as they are: the tensors do not tell."""
    form = FORMATS["gptq_act_order"]
    stored, _ = encode_all(weights(), lambda stem: form if "_proj" in stem else None)
    folders = []
    for kind in ("gptq_v2", "gptq"):
        said = {"quant_method": "gptq", **form.config, "checkpoint_format": kind}
        folders.append(write(tmp_path / kind, stored, quantization_config=said))
    spec = tpkit.load_spec("llama", config=folders[0])
    with pytest.raises(SpecError, match="disagree on gptq checkpoint_format"):
        tpkit.plan_model(spec, ranks=1, checkpoint=tpkit.open_checkpoint(folders[1]))
