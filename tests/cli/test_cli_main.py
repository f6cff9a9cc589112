"""The command line as a user meets it: help, exit codes, errors, and what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli import reference
from octavo.cli.main import COMMANDS, command_parser, main
from octavo.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: octavo {name}")
    assert "OCTAVO_SOME_FLAG" in text
    assert "(default: none)" not in text  # what happens without a value is said in words


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_overview_lists_every_command(words, capsys):
    assert main(words) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    "words", [["--help"], ["serve", "--help"], ["compress", "--help"], ["bench", "--help"], ["plan", "kv", "demo"]]
)
def test_what_needs_no_model_imports_no_torch(words):
    code = (
        f"import sys; from octavo.cli.main import main; rc = main({words!r}); "
        "print(sorted({'torch', 'transformers', 'fastapi', 'numpy'} & set(sys.modules)), file=sys.stderr); sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ([], 2, None),
        (["serv"], 2, "there is no command 'serv'; did you mean `octavo serve`?"),
        (["xyzzy"], 2, "there is no command 'xyzzy'; `octavo --help` lists"),
        (["plan"], 2, "octavo plan needs a command"),
        (["plan", "x"], 2, "there is no command 'plan x'"),
        (["plan", "kv"], 2, "MODEL must be given"),
        (["plan", "kv", "demo", "--tokens", "x"], 2, "--tokens: 'x' is not a whole number"),
        (["plan", "kv", "demo", "--tokens", "0"], 1, "0 is too few"),
        (["plan", "kv", "no-such-model"], 1, "'no-such-model' is none of these"),
        (["plan", "memory"], 2, "give MODEL or --params"),
        (["plan", "memory", "--params", "lots"], 1, "'lots' is no parameter count"),
        (["plan", "memory", "demo", "--accelerator", "abacus"], 1, "'abacus' is not known"),
        (["bench", "--target", "ftp://x", "--profile", "synchronous"], 2, "must start with http"),
        (["bench", "--target", "http://x", "--profile", "sideways"], 2, "--profile: 'sideways' is none of"),
        (["bench", "--target", "http://x", "--profile", "sweep", "--rate", "3"], 2, "finds its own rate"),
        (["bench", "--target", "http://x", "--profile", "constant"], 2, "needs --rate"),
        (["bench", "--target", "http://x", "--profile", "throughput", "--slo", "fast"], 2, "--slo has 'fast'"),
        (["serve", "demo", "--port", "99999"], 2, "port is 99999; it must be 0 to 65535"),
        (["compress", "m", "--output-dir", "o", "--scheme", "FP7"], 2, "unknown scheme 'FP7'"),
        (["compress", "m", "--output-dir", "o", "--scheme", "W5"], 2, "unknown scheme 'W5'"),
        (["compress", "m", "--output-dir", "o", "--algorithm", "magic"], 2, "unknown step 'magic'"),
        (["compress", "m", "--output-dir", "o", "--num-calibration-samples", "0"], 2, "num_calibration_samples is 0"),
        (["compress", "m", "--output-dir", "o", "--group-size", "1"], 2, "group size 1 is not possible"),
        (["compress", "m", "--output-dir", "o", "--recipe", "none.yaml"], 2, "none.yaml is not there"),
        (["compress", "no-such-model", "--output-dir", "o"], 1, "no model 'no-such-model'"),
        (["chat"], 2, "give MODEL or --url"),
        (["chat", "--url", "http://127.0.0.1:9", "-q", "hello"], 1, "no server answers at http://127.0.0.1:9"),
    ],
)
def test_exit_codes_and_messages(words, code, problem, capsys):
    assert main(words) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if problem is not None:
        assert problem in said.err
        assert said.out == ""


def test_debug_shows_the_traceback(capsys):
    assert main(["plan", "kv", "no-such-model", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["--debug", "plan", "kv", "no-such-model"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "octavo: interrupted"),
        (UserError("the value is 3; it must be 4"), 1, "octavo: error: the value is 3; it must be 4"),
        (FileNotFoundError(2, "No such file or directory", "x"), 1, "No such file or directory: 'x'"),
        (ZeroDivisionError("oh"), 1, "octavo: unexpected ZeroDivisionError: oh"),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(error, code, said, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr("octavo.cli.plan_kv.run", fail)
    assert main(["plan", "kv", "demo"]) == code
    assert said in capsys.readouterr().err


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m octavo plan kv demo | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_kv_prints_the_course_table(capsys):
    assert main(["plan", "kv", "llama-3-70b"]) == 0
    text = capsys.readouterr().out
    for words in ("327,680 bytes = 320.0 KiB", "655.4 MB", "41.9 GB", "39.1 GiB", "419.4 GB"):
        assert words in text


def test_plan_json(capsys):
    assert main(["plan", "kv", "llama-3-70b", "--tokens", "128k", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"tokens": 128000, "bytes_per_request": 41943040000, "bytes_total": 419430400000}]
    assert main(["plan", "memory", "--params", "109B", "--json"]) == 0
    assert [row["devices"] for row in json.loads(capsys.readouterr().out)["rows"]] == [3, 2, 1]


def test_plan_memory_explains_the_gap(capsys):
    assert main(["plan", "memory", "qwen3-0.6b", "--accelerator", "l40s"]) == 0
    text = capsys.readouterr().out
    assert "43% less" in text
    assert "48.0 GB" in text


def test_plan_reads_a_gguf(demo_path, capsys):
    assert main(["plan", "kv", str(demo_path), "--tokens", "1", "--kv-cache-dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 2 * 30 * 3 * 64 * 2


def test_serve_refuses_what_it_cannot_do(capsys):
    parser = command_parser("serve")
    assert {"max_model_len", "port", "api_key", "enable_prefix_caching"} <= set(parser.settings)
    assert main(["serve", "demo", "--block-size", "7"]) == 2
    assert "block_size is 7" in capsys.readouterr().err


def test_docs_are_current():
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert committed == reference.page(), "run: python -m octavo.cli.reference docs/settings.md"


def test_main_reads_sys_argv(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["octavo", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("octavo ")


def test_info_names_versions_devices_and_kernels(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] != "not installed"
    operations = {row["operation"] for row in found["kernels"]}
    assert {"rms_norm", "paged_attention"} <= operations
    for operation in operations:  # exactly one candidate serves each operation
        assert sum(row["chosen"] for row in found["kernels"] if row["operation"] == operation) == 1
    assert main(["info"]) == 0
    assert "paged_attention" in capsys.readouterr().out


def test_convert_writes_a_checkpoint(tiny_llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(tiny_llama), "--output-dir", str(out), "--dtype", "float32"]) == 0
    assert (out / "config.json").is_file()
    assert str(out) in capsys.readouterr().out
    assert main(["convert", "no-such-model", "--output-dir", str(out)]) == 1
