"""Configs: YAML both ways, overrides, and one sentence for values that do not fit."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from graftlm.config import Config, apply_override, read_yaml
from graftlm.errors import RecipeError


class Tool(Config):
    kind: str


class Spade(Tool):
    kind: Literal["spade"] = "spade"
    width: float = Field(default=0.2, gt=0)


class Steps(Config):
    steps: int = Field(default=100, ge=1)
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"

    @model_validator(mode="after")
    def _check(self) -> Steps:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck: choose 12 or 14")
        return self


class Recipe(Config):
    name: str
    training: Steps = Steps()
    tool: SerializeAsAny[Spade] = Spade()
    parts: list[Steps] = []
    tests: dict[str, list[Steps]] = {}
    free: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    maybe: Steps | None = None
    either: str | Steps = ""
    quick: bool = False


def reason(**values: Any) -> str:
    """Return the message of the error for `values`."""
    with pytest.raises(RecipeError) as caught:
        Recipe.parse({"name": "x"} | values)
    return str(caught.value)


def read(tmp_path: Path, content: str | bytes, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Recipe.from_yaml(path, overrides)


# --- there and back -------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["no", "yes", "2:10", "1e-4", "~", "null", "1_000", "012", "0x1", "2020-01-01", ".5", "<<", "=", " "]
    ),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.builds(
    Steps,
    steps=st.integers(1, 12),
    rate=FLOATS,
    betas=st.tuples(FLOATS, FLOATS),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
RECIPES = st.builds(
    Recipe,
    name=TEXTS,
    training=STEPS,
    tool=st.builds(Spade, width=st.floats(0.1, 10)),
    parts=st.lists(STEPS, max_size=2),
    tests=st.dictionaries(TEXTS, st.lists(STEPS, max_size=2), max_size=2),
    free=st.dictionaries(TEXTS, VALUES, max_size=3),
    maybe=st.none() | STEPS,
    either=TEXTS | STEPS,
    quick=st.booleans(),
)


@given(RECIPES)
def test_yaml_gives_the_same_config_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert Recipe.from_yaml(path) == recipe


@given(RECIPES)
def test_written_text_stays_text_for_readers_of_older_yaml(recipe: Recipe) -> None:
    assert yaml.safe_load(recipe.to_yaml())["name"] == recipe.name


def test_defaults_are_left_out_but_what_names_the_kind_stays() -> None:
    assert Recipe(name="x").to_yaml() == "name: x\n"
    assert Recipe(name="x", tool=Spade(width=0.5)).to_yaml() == "name: x\ntool:\n  kind: spade\n  width: 0.5\n"


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:10", "2:10"),
        ("no", "no"),
        ("on", "on"),
        ("2020-01-01", "2020-01-01"),
        ("2020-13-45", "2020-13-45"),
        ("1e-4", 1e-4),
        ("-.5", -0.5),
        ("3.", 3.0),
        (".inf", float("inf")),
        ("012", 12),
        ("+7", 7),
        ("true", True),
        ("'true'", "true"),
        ("null", None),
        ("~", None),
        ("", None),
        ("0x10", 16),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    scalar = read(tmp_path, f"name: x\nfree: {{a: {text}}}").free["a"]
    assert (type(scalar), scalar) == (type(value), value)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffname: x\r\ntraining:\r\n  steps: 3\r\n").training.steps == 3


def test_merge_keys_may_be_overruled(tmp_path: Path) -> None:
    recipe = read(tmp_path, "name: x\ntraining: &t {steps: 3, rate: 1}\nparts: [{<<: *t, steps: 4}]")
    assert recipe.parts == [Steps(steps=4, rate=1)]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty"),
        ("# only a comment", "empty"),
        ("text", "a string"),
        ("- a", "a list"),
        ("12", "a number"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"\x00\x01\x02", "YAML"),
        (b"PK\x03\x04", "YAML"),
        ("name: [", "line 1"),
        ("name: x\n\ttraining: {}", "line 2"),
        ("name: x\nname: y", "line 2"),
        ("name: x\ntraining: {steps: 1, steps: 2}", "line 2"),
        ("name: x\n---\nname: y", "document"),
        ("name: *unknown", "'unknown'"),
        ("[" * 1_000, "nested"),
        ("{a: " * 3_000, "nested"),
        ("a: " + "9" * 5_000, "tag"),
        ("a: !!int x", "tag"),
        ("a: !!python/object/apply:os.system [true]", "line 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_sentence(tmp_path: Path, content: str | bytes, named: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert "recipe" in message
    assert named in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))


def test_a_missing_file_a_folder_and_an_unusable_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (
        tmp_path / "none.yaml",
        tmp_path,
        tmp_path / "file" / "recipe.yaml",
        tmp_path / ("a" * 300),
    ):
        with pytest.raises(RecipeError) as caught:
            read_yaml(path)
        assert str(tmp_path) in str(caught.value)


@given(st.binary(max_size=60) | st.text(string.punctuation + string.whitespace + "ab1", max_size=60).map(str.encode))
def test_any_bytes_give_a_recipe_or_one_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    message = ""
    try:
        read(tmp_path_factory.getbasetemp(), content)
    except RecipeError as error:
        message = str(error)
    assert "\n" not in message


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"trainin": {}}, ("trainin", "did you mean training?")),
        ({"training": {"stepz": 3}}, ("training.stepz", "did you mean steps?")),
        ({"parts": [{}, {"rat": 3}]}, ("parts.1.rat", "did you mean rate?")),
        ({"tests": {"old": [{"rat": 3}]}}, ("tests.old.0.rat", "did you mean rate?")),
        ({"maybe": {"rat": 3}}, ("maybe.rat", "did you mean rate?")),
        ({"training": {"zzz": 3}}, ("training.zzz", "known: betas, rate, schedule, steps")),
        ({"tool": {"kind": "rake"}}, ("tool.kind", "'spade'", "'rake'")),
        ({"training": {"steps": "many"}}, ("training.steps", "integer", "'many'")),
        ({"training": {"steps": 1.5}}, ("training.steps", "integer", "1.5")),
        ({"training": {"steps": 0}}, ("training.steps", "greater than or equal to 1", "found 0")),
        ({"training": {"rate": float("nan")}}, ("training.rate", "finite", "nan")),
        ({"training": {"rate": float("inf")}}, ("training.rate", "finite", "inf")),
        ({"training": None}, ("training", "mapping", "nothing")),
        ({"training": [1]}, ("training", "mapping", "a list")),
        ({"training": {"betas": [1]}}, ("training.betas.1", "missing")),
        ({"tests": {"old": {}}}, ("tests.old", "list", "a mapping")),
        ({"name": 3}, ("name", "string", "3", "quotes")),
        ({"training": {"steps": 13}}, ("training", "choose 12 or 14")),
        ({"training": {"steps": "1" + 5000 * "0"}}, ("training.steps", "smaller whole number")),
        ({"nam": "x", "trainin": {}}, ("nam", "did you mean name?", "1 more")),
    ],
)
def test_what_does_not_fit_is_named_in_one_sentence(values: dict[str, Any], named: tuple[str, ...]) -> None:
    message = reason(**values)
    assert message.startswith("config: ")
    assert all(text in message for text in named), message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_missing_key_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse({})
    assert "key name" in str(caught.value)


def test_a_typo_is_reported_before_the_missing_key() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse({"nme": "x"})
    assert "nme (did you mean name?) (and 1 more)" in str(caught.value)


def test_a_typo_inside_one_branch_of_a_union_is_found() -> None:
    assert "rat (did you mean rate?)" in reason(either={"rat": 1})


def test_a_validator_of_the_whole_needs_no_key() -> None:
    with pytest.raises(RecipeError) as caught:
        Steps(steps=13)
    assert str(caught.value).startswith("Steps: 13 steps")


def test_a_truth_value_is_not_a_number() -> None:
    """Truth values are refused in lists and mappings at any depth, and kept where they are allowed."""
    for values, key in (
        ({"training": {"steps": True}}, "training.steps"),
        ({"parts": [{}, {"betas": [0.9, True]}]}, "parts.1.betas.1"),
        ({"rates": {"low": [1e-3, True]}}, "rates.low.1"),
    ):
        message = reason(**values)
        assert message.startswith(f"config: {key}: ")
        assert "True" in message
    with pytest.raises(RecipeError) as caught:
        Steps(rate=False)
    assert str(caught.value).startswith("Steps: rate: ")
    assert Recipe(name="x", quick=True, free={"a": [True, 1]}).free == {"a": [True, 1]}
    assert Recipe(name="x", quick=True).quick is True


def test_a_value_that_contains_itself_is_allowed_where_any_value_is(tmp_path: Path) -> None:
    recipe = read(tmp_path, "name: x\nfree: {a: &a [1, *a]}\n")
    assert recipe.free["a"][1] is recipe.free["a"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [(None, "nothing"), ([], "a list"), ("text", "a string"), (3, "a number")],
)
def test_only_mappings_are_parsed(values: Any, kind: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(values)
    assert kind in str(caught.value)


def test_long_values_and_keys_are_shortened() -> None:
    assert len(reason(quick="z" * 10_000)) < 200
    assert len(reason(**{"z" * 10_000: 1})) < 200


def test_python_callers_get_the_same_sentence() -> None:
    with pytest.raises(RecipeError) as caught:
        Steps(stps=3)  # type: ignore[call-arg]
    assert str(caught.value).startswith("Steps: ")
    assert "stps (did you mean steps?)" in str(caught.value)
    with pytest.raises(TypeError):
        Steps(3)  # type: ignore[call-arg]


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Steps().steps = 3  # type: ignore[misc]


# --- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.steps=3", ("training", "steps"), 3),
        ("training.rate=1e-4", ("training", "rate"), 1e-4),
        ("training.rate = 2", ("training", "rate"), 2),
        ("name=a=b", ("name",), "a=b"),
        ("name='3'", ("name",), "3"),
        ("name=2:10", ("name",), "2:10"),
        ("name=''", ("name",), ""),
        ("maybe.steps=4", ("maybe", "steps"), 4),
        ("parts.1.steps=5", ("parts", 1, "steps"), 5),
        ("tests={old: [{steps: 6}]}", ("tests", "old", 0, "steps"), 6),
        ("free.a.b.c=[1]", ("free", "a", "b", "c"), [1]),
        ("quick=true", ("quick",), True),
    ],
)
def test_an_override_sets_one_key(tmp_path: Path, override: str, path: tuple[str | int, ...], value: Any) -> None:
    node: Any = read(tmp_path, "name: x\nmaybe:\nparts: [{}, {}]", override).model_dump()
    for key in path:
        node = node[key]
    assert node == value


def test_later_overrides_win(tmp_path: Path) -> None:
    assert read(tmp_path, "name: x", "training.steps=3", "training.steps=4").training.steps == 4


def test_an_override_does_not_change_values_with_the_same_alias(tmp_path: Path) -> None:
    content = "name: x\nmaybe: &a {steps: 3}\ntraining: *a\nparts: &p [*a]\ntests: {old: *p}"
    recipe = read(tmp_path, content, "parts.0.steps=9")
    assert recipe.parts[0].steps == 9
    assert recipe.maybe == Steps(steps=3)
    assert recipe.training == Steps(steps=3)
    assert recipe.tests["old"][0] == Steps(steps=3)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.steps", "key=value"),
        ("=3", "key=value"),
        ("", "key=value"),
        (".=3", "key=value"),
        ("training..steps=3", "key=value"),
        ("training.steps=[", "YAML"),
        ("training.steps=" + "[" * 1_000, "YAML"),
        ("training.steps=\0", "YAML"),
        ("training.stepz=3", "training.stepz (did you mean steps?)"),
        ("name.x=3", "a string"),
        ("name.x.y=3", "a string"),
        ("parts.2.steps=3", "'2'"),
        ("parts.-1.steps=3", "'-1'"),
        ("parts.²=3", "'²'"),
        ("parts.x=3", "'x'"),
        ("training.steps=", "training.steps: "),
    ],
)
def test_an_override_that_does_not_fit_is_refused(tmp_path: Path, override: str, named: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, "name: x\nparts: [{}]", override)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@given(TEXTS)
def test_any_override_is_applied_or_refused(override: str) -> None:
    values: dict[str, Any] = {"name": "x", "parts": [{}]}
    try:
        apply_override(values, override)
    except RecipeError:
        assert values == {"name": "x", "parts": [{}]}


def test_an_error_names_the_override_that_causes_it_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, "name: x", "quick=true", "training.stps=5", "training.rate=1")
    assert "'training.stps=5'" in str(caught.value)
    assert "training.stps (did you mean steps?)" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, "nam: x", "name=y", "training.steps=5")
    assert "recipe.yaml: " in str(caught.value)
    assert "nam (did you mean name?)" in str(caught.value)
