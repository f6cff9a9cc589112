"""Flags, environment, YAML and defaults from one dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.errors import UserError
from octavo.settings import setting
from octavo.settings_docs import render_settings
from octavo.settings_parser import SettingsParser, UsageError
from octavo.settings_values import ValueProblem, convert, human_int, split_list


@dataclass
class Demo:
    """Demo settings."""

    model: str = setting(help="what to load", positional=True)
    output_dir: str = setting(help="where to write")
    max_model_len: int | Literal["auto"] | None = setting(None, "context length")
    port: int = setting(8000, "port")
    share: float = setting(0.9, "a share of 100 %")
    enable_cache: bool = setting(True, "cache or not")
    kind: str = setting("a", "which kind", choices=("a", "b"))
    rates: list[float] = setting(help="rates", default_factory=lambda: [1.0])
    names: list[str] | None = setting(None, "names", short="-n")
    extra: dict[str, Any] | None = setting(None, "more")
    where: Path | None = setting(None, "a path")
    private: int = field(default=3)  # no setting: users cannot reach it

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"port is {self.port}; it must be 0 to 65535")


def make(*words: str, env: dict[str, str] | None = None) -> Demo:
    instances, _ = SettingsParser("demo", "text", [Demo]).parse(["m", "--output-dir", "d", *words], env or {})
    return instances[0]


def test_defaults():
    assert make() == Demo(model="m", output_dir="d")


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--max-model-len=25.6k"], "max_model_len", 25600),
        (["--max-model-len", "auto"], "max_model_len", "auto"),
        (["--max_model_len", "7"], "max_model_len", 7),
        (["--max-model-len", "none"], "max_model_len", None),
        (["--no-enable-cache"], "enable_cache", False),
        (["--share", "0.5"], "share", 0.5),
        (["--kind", "b"], "kind", "b"),
        (["--rates", "1,2.5", "4"], "rates", [1.0, 2.5, 4.0]),
        (["-n", "re:a{1,2}", "b"], "names", ["re:a{1,2}", "b"]),
        (["--extra", '{"a": [1]}'], "extra", {"a": [1]}),
        (["--where", "x/y"], "where", Path("x/y")),
    ],
)
def test_flags(words, name, value):
    assert getattr(make(*words), name) == value


def test_a_positional_argument_may_stand_anywhere():
    parser = SettingsParser("demo", "text", [Demo])
    for words in (["m", "--output-dir", "d"], ["--output-dir", "d", "m"], ["--port", "1", "m", "--output-dir=d"]):
        assert parser.parse(words, {})[0][0].model == "m"


def test_flag_wins_over_environment_over_yaml_over_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nshare: 0.1\nkind: b\nenable-cache: false\nrates: [3, 4]\nmax_model_len: 8k\n")
    env = {"OCTAVO_PORT": "2", "OCTAVO_SHARE": "0.2", "OCTAVO_MODEL": "never: a positional has no variable"}
    made = make("--config", str(file), "--port", "3", env=env)
    assert (made.port, made.share, made.kind) == (3, 0.2, "b")
    assert (made.enable_cache, made.rates, made.max_model_len, made.model) == (False, [3.0, 4.0], 8000, "m")


def test_yaml_can_hold_everything(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: m\noutput-dir: d\nextra: {a: 1}\nnames: x,y\nmax-model-len: auto\n")
    made = SettingsParser("demo", "text", [Demo]).parse(["--config", str(file)], {})[0][0]
    assert made == Demo("m", "d", "auto", extra={"a": 1}, names=["x", "y"])


@pytest.mark.parametrize(
    ("words", "env", "problem"),
    [
        (["--port", "abc"], {}, r"--port: 'abc' is not a whole number"),
        ([], {"OCTAVO_PORT": "1.5"}, r"OCTAVO_PORT: '1.5' is 1.5, which is not a whole number"),
        (["--port", "70000"], {}, "port is 70000; it must be 0 to 65535"),
        (["--kind", "c"], {}, "--kind: 'c' is none of a, b"),
        (["--max-model-len", "long"], {}, "--max-model-len: .*'long' is not a whole number.*none of auto"),
        (["--share", "much"], {}, "--share: 'much' is not a number"),
        (["--share", "nan"], {}, "--share: 'nan' is not a number"),
        ([], {"OCTAVO_ENABLE_CACHE": "maybe"}, "OCTAVO_ENABLE_CACHE: 'maybe' is neither true nor false"),
        (["--extra", "{"], {}, "--extra: .* is not JSON"),
        (["--extra", "[1]"], {}, "--extra: .* is not a JSON object"),
        (["--prt", "1"], {}, "there is no flag --prt; did you mean --port"),
        (["--por", "1"], {}, "there is no flag --por; did you mean --port"),
        (["two"], {}, "'two' is one argument too many: it takes MODEL"),
        (["--port"], {}, "--port: expected one argument"),
        (["--config", "/no/such.yaml"], {}, "'/no/such.yaml' cannot be read"),
    ],
)
def test_errors_name_the_value_and_the_way_out(words, env, problem):
    with pytest.raises(UsageError, match=problem):
        make(*words, env=env)


def test_what_is_missing_is_named():
    parser = SettingsParser("demo", "text", [Demo])
    with pytest.raises(UsageError, match="MODEL and --output-dir must be given"):
        parser.parse([], {})
    with pytest.raises(UsageError, match="put MODEL before it"):
        parser.parse(["--output-dir", "d", "--names", "a", "m"], {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prt: 1", "unknown key 'prt'; did you mean port"),
        ("- 1", "must hold lines of `key: value`, not a list"),
        ("a: [", "is not YAML"),
        ("port: x", "port in the configuration file: 'x' is not a whole number"),
        ("port: true", "port in the configuration file: True is not a whole number"),
        ("share: true", "True is not a number"),
        ("port: null", "a value is needed"),
    ],
)
def test_yaml_errors(tmp_path, text, problem):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        make("--config", str(file))


@pytest.mark.parametrize(
    ("text", "value"),
    [("16", 16), ("-1", -1), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2 << 20), ("1.5G", 3 << 29),
     ("2GiB", 2 << 30), ("2GB", 2 * 10**9), ("3 MiB", 3 << 20), ("0.5K", 512)],
)  # fmt: skip
def test_human_sizes(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "25.6K", "1.5", "0x10", "1e3", "--1"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ValueProblem):
        human_int(text)


def test_lists_and_tuples():
    assert split_list("a,b(1,2),[x,y], c ,") == ["a", "b(1,2)", "[x,y]", "c"]
    assert convert("1,2", tuple[int, ...]) == (1, 2)
    assert convert([1, "2k"], list[int]) == [1, 2000]


def test_help_and_docs_show_every_setting():
    parser = SettingsParser("demo", "text", [Demo], examples="demo x")
    text = parser.format_help()
    for words in ("MODEL", "--max-model-len N", "(default: 8000)", "--no-enable-cache", "{a,b}", "(required)", "100 %"):
        assert words in text, words
    assert "private" not in text
    page = render_settings([parser])
    assert "| `--port` | `8000` | `OCTAVO_PORT` | port. |" in page
    assert "| `-n, --names` |" in page
    assert "| `MODEL` | required |  | what to load. |" in page


def test_two_classes_share_a_field():
    @dataclass
    class Other:
        """Other settings."""

        port: int = setting(1, "another port")
        word: str = setting("w", "a word")

    demo, other = SettingsParser("demo", "text", [Demo, Other]).parse(["m", "--output-dir", "d", "--port", "9"], {})[0]
    assert (demo.port, other.port, other.word) == (9, 9, "w")
