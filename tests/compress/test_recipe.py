"""Recipes, schemes and settings: what they mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.compress.command import modifiers_of, run
from octavo.compress.config import CompressConfig
from octavo.compress.recipe import dump_recipe, parse_recipe
from octavo.errors import UserError
from octavo.modifiers import GPTQModifier, QuantizationModifier

YAML = """
quant_stage:
  quant_modifiers:
    GPTQModifier:
      targets: [Linear]
      ignore: [lm_head, 're:.*mlp.gate$']
      scheme: W4A16
      dampening_frac: 0.02
"""


def test_recipes_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML)
    as_json = tmp_path / "recipe.json"
    as_json.write_text(json.dumps({"s_stage": {"a_modifiers": {"QuantizationModifier": {"scheme": "W8A16"}}}}))
    for recipe in (YAML, path, str(path), [YAML]):
        (modifier,) = parse_recipe(recipe)
        assert isinstance(modifier, GPTQModifier)
        assert modifier.dampening_frac == 0.02
        assert modifier.ignore == ["lm_head", "re:.*mlp.gate$"]
    assert parse_recipe(as_json)[0] == QuantizationModifier(scheme="W8A16")
    both = [
        GPTQModifier(scheme="W4A16", targets=["re:.*mlp"]),
        QuantizationModifier(scheme="W8A16", targets=["re:.*q"]),
    ]
    assert parse_recipe(both) == both
    assert parse_recipe(dump_recipe(both)) == both  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("a_stage:\n  m_modifiers:\n    MagicModifier: {}", "'MagicModifier' is unknown"),
        ("a_stage:\n  m_modifiers:\n    GPTQModifier: {scheme: W4A16, dampening: 1}", "takes no 'dampening'; it takes"),
        ("stage:\n  m: 1", "'stage' is not understood"),
        ("a_stage: {}\nb: [", "not YAML"),
        ("just text\n", "mapping of stages"),
        ("nowhere.yaml", "is not there"),
        ("a_stage: {}\n", "names no modifier"),
        (7, "recipe is a int"),
    ],
)
def test_bad_recipes_are_named(recipe: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_recipe(recipe)


def test_modifiers_refuse_what_they_do_not_know() -> None:
    with pytest.raises(TypeError, match="offload_hessians"):
        GPTQModifier(scheme="W4A16", offload_hessians=True)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="either scheme"):
        QuantizationModifier()
    with pytest.raises(UserError, match="observer or weight_observer"):
        QuantizationModifier(scheme="W4A16", observer="mse", weight_observer="mse")
    with pytest.raises(UserError, match="only 'weights' is chosen by an observer"):
        QuantizationModifier(scheme="W4A16", observer={"input": "minmax"})


def test_settings_become_a_modifier() -> None:
    assert modifiers_of(CompressConfig("m", "out")) == [GPTQModifier(scheme="W4A16", ignore=["lm_head"])]
    settings = CompressConfig("m", "out", scheme="W8A16", algorithm="rtn", observer="mse", group_size=64)
    expected = QuantizationModifier(scheme="W8A16", ignore=["lm_head"], weight_observer="mse", group_size=64)
    assert modifiers_of(settings) == [expected]
    assert modifiers_of(CompressConfig("m", "out", actorder="none"))[0].actorder is None  # type: ignore[attr-defined]
    assert not modifiers_of(CompressConfig("m", "out", align=False))[0].align  # type: ignore[attr-defined]
    for text, observer in ((None, None), ("text.txt", "hessian_signed")):
        config = CompressConfig("m", "out", algorithm="rtn", calibration_file=text)
        assert modifiers_of(config)[0].weight_observer == observer  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="unknown step 'magic'"):
        modifiers_of(CompressConfig("m", "out", algorithm="magic+gptq"))
    with pytest.raises(UserError, match="one step quantizes"):
        modifiers_of(CompressConfig("m", "out", algorithm="gptq+rtn"))
    with pytest.raises(UserError, match="not both"):
        modifiers_of(CompressConfig("m", "out", recipe="r.yaml", scheme="W4A16"))
    with pytest.raises(UserError, match="--group-size does not go with a recipe"):
        modifiers_of(CompressConfig("m", "out", recipe="r.yaml", group_size=64))
    with pytest.raises(UserError, match="--dampening-frac does not go with algorithm rtn"):
        modifiers_of(CompressConfig("m", "out", algorithm="rtn", dampening_frac=0.1))
    with pytest.raises(UserError, match="not both"):
        run(CompressConfig("m", "out", dataset="wikitext", calibration_file="a.txt"))


def test_the_command_line_compresses_a_checkpoint(
    tiny_llama: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = CompressConfig(
        str(tiny_llama), str(tmp_path), group_size=32, calibration_file=str(text_file), max_seq_length=32,
        num_calibration_samples=4,
    )  # fmt: skip
    result = run(settings)
    printed = capsys.readouterr().out
    assert "4-bit codes alone take 12.5 % of 32-bit weights" in printed
    assert "the embeddings stay unquantized" in printed
    report = json.loads((tmp_path / "compression_report.json").read_text())
    assert report == json.loads(json.dumps(result.report))
    assert report["calibration"] == {"source": str(text_file), "sequences": 4, "tokens": 128}
    size = report["size"]
    gap = size["ideal_percent"] - size["saved_percent"]
    points = [float(line.split()[0]) for line in size["explanation"][1:]]
    assert sum(points) == pytest.approx(gap, abs=0.3)
    assert all(layer["error"] < 0.2 for layer in report["layers"])
    assert {"config.json", "model.safetensors", "recipe.yaml", "tokenizer.json"} <= {p.name for p in tmp_path.iterdir()}


def test_steps_of_every_kind_make_a_chain() -> None:
    chain = modifiers_of(CompressConfig("m", "out", algorithm="spinquant+sparsegpt+gptq"))
    assert [type(modifier).__name__ for modifier in chain] == [
        "SpinQuantModifier", "SparseGPTModifier", "GPTQModifier",
    ]  # fmt: skip
    assert chain[1].mask_structure == "2:4"  # type: ignore[attr-defined]
    assert [type(modifier).__name__ for modifier in modifiers_of(CompressConfig("m", "out", algorithm="wanda"))] == [
        "WandaPruningModifier",
        "QuantizationModifier",
    ]
