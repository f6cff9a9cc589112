"""Command lines from dataclasses of settings: flag > environment > YAML file > default.

Built on argparse on purpose: `octavo --help` has to answer in under 0.3 s, and importing argparse takes a tenth of what
the generators on top of other libraries take.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from octavo.errors import OctavoError, UserError
from octavo.settings_values import ValueProblem, allowed_values, convert, element_type, is_bool, members

ENV_PREFIX = "OCTAVO_"
T = TypeVar("T")


class UsageError(OctavoError):
    """The command was called wrongly: exit code 2."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field that users can set, and its names everywhere."""

    name: str
    hint: Any
    default: Any  # dataclasses.MISSING: it must be given
    help: str
    choices: tuple[str, ...] | None
    positional: bool
    short: str | None
    metavar: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def label(self) -> str:
        return self.metavar if self.positional else self.flag

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def default_text(self) -> str:
        """The default as a user would write it."""
        if self.default is None:
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, (list, tuple)):
            return ",".join(str(v) for v in self.default) or "none"
        return str(self.default)


def settings_of(cls: type) -> list[Setting]:
    """The fields of a dataclass that were declared with `octavo.settings.setting`."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        if "positional" not in field.metadata:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        choices = allowed_values(hints[field.name], field.metadata["choices"])
        found.append(
            Setting(
                name=field.name,
                hint=hints[field.name],
                default=default,
                help=field.metadata["help"],
                choices=choices or None,
                positional=field.metadata["positional"],
                short=field.metadata["short"],
                metavar=field.metadata["metavar"] or _metavar(field.name, hints[field.name], choices),
            )
        )
    return found


def _metavar(name: str, hint: Any, choices: Sequence[str]) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = [k for k in members(hint) if k is not type(None)]
    if element_type(hint) is not None:
        return name.upper() + ",.."
    if int in kinds or float in kinds:
        return "N"
    kind = typing.get_origin(kinds[0]) or kinds[0]
    return {dict: "JSON", Path: "PATH"}.get(kind, name.upper())


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lists as one value: `--bits BITS,..` instead of argparse's `--bits BITS,.. [BITS,.. ...]`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=116)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar) if action.nargs == "+" else super()._format_args(action, default_metavar)


class SettingsParser(argparse.ArgumentParser):
    """The parser of one command. Positional values are matched after the flags, so their order does not matter."""

    def __init__(self, prog: str, description: str, classes: Sequence[type], examples: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=_epilog(examples),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        self.classes = tuple(classes)
        self.settings: dict[str, Setting] = {}
        for cls in self.classes:
            self._add_class(cls)
        common = self.add_argument_group("every command")
        common.add_argument("--config", metavar="FILE.yaml", help="read settings from this YAML file")
        common.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self.usage = self._usage()

    def _add_class(self, cls: type) -> None:
        new = [s for s in settings_of(cls) if s.name not in self.settings]
        self.settings.update({s.name: s for s in new})
        if not any(not s.positional for s in new):
            return
        group = self.add_argument_group((cls.__doc__ or cls.__name__).strip().split("\n")[0].rstrip("."))
        for s in new:
            if not s.positional:
                _add_flag(group, s)

    def _usage(self) -> str:
        places = [s.metavar if s.is_required else f"[{s.metavar}]" for s in self.settings.values() if s.positional]
        needed = [f"{s.flag} {s.metavar}" for s in self.settings.values() if s.is_required and not s.positional]
        return " ".join([self.prog, *places, *needed, "[flags]"])

    def format_help(self) -> str:
        text = super().format_help()
        places = [s for s in self.settings.values() if s.positional]
        if not places:
            return text
        width = max(len(s.metavar) for s in places) + 4
        lines = "".join(f"  {s.metavar:<{width}}{s.help}{_default_note(s)}\n" for s in places)
        head, mark, tail = text.partition("\noptions:\n")
        return f"{head}\narguments:\n{lines}{mark}{tail}"

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[Any], argparse.Namespace]:
        """One instance of each class, and the namespace with `debug`. UsageError when it was called wrongly."""
        given, rest = self.parse_known_args([_dashes(word) for word in argv])
        self._place(rest, given)
        file = read_yaml(given.config, self.settings) if "config" in given else {}
        values = {s.name: v for s in self.settings.values() for v in self._value(s, vars(given), environ, file)}
        self._require(values)
        return [self._make(cls, values) for cls in self.classes], given

    def _place(self, rest: list[str], given: argparse.Namespace) -> None:
        for word in rest:
            if word.startswith("-") and word != "-":
                raise UsageError(f"there is no flag {word}{self._suggest(word)}")
        places = [s for s in self.settings.values() if s.positional]
        if len(rest) > len(places):
            known = " ".join(s.metavar for s in places) or "no argument"
            raise UsageError(f"{rest[len(places)]!r} is one argument too many: it takes {known}")
        for s, word in zip(places, rest, strict=False):
            setattr(given, s.name, word)

    def _suggest(self, word: str) -> str:
        flags = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        return f"; did you mean {near[0]}?" if near else f" ({self.prog} --help lists them)"

    @staticmethod
    def _value(
        s: Setting, flags: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]
    ) -> Iterable[Any]:
        if s.name in flags:
            source, raw = s.label, flags[s.name]
        elif not s.positional and s.env in environ:
            source, raw = s.env, environ[s.env]
        elif s.name in file:
            source, raw = f"{s.name} in the configuration file", file[s.name]
        else:
            return
        try:
            yield convert(raw, s.hint, s.choices)
        except ValueProblem as problem:
            raise UsageError(f"{source}: {problem}") from None

    def _require(self, values: Mapping[str, Any]) -> None:
        missing = [s.label for s in self.settings.values() if s.is_required and s.name not in values]
        if missing:
            hint = ""
            if any(element_type(s.hint) and len(values.get(s.name, ())) > 1 for s in self.settings.values()):
                hint = " (a flag that takes a list takes every word up to the next flag: put MODEL before it)"
            raise UsageError(f"{' and '.join(missing)} must be given{hint}\nusage: {self.usage}")

    @staticmethod
    def _make(cls: type[T], values: Mapping[str, Any]) -> T:
        own = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        try:
            made = cls(**{name: value for name, value in values.items() if name in own})
            if callable(check := getattr(made, "check", None)):
                check()
            return made
        except UserError as error:  # the field's own check of its range
            raise UsageError(str(error)) from error


def _add_flag(group: argparse._ArgumentGroup, s: Setting) -> None:
    names = [s.short, s.flag] if s.short else [s.flag]
    text = (s.help.rstrip(".") + _default_note(s)).replace("%", "%%")
    if is_bool(s.hint):
        group.add_argument(*names, dest=s.name, action=argparse.BooleanOptionalAction, help=text)
    elif element_type(s.hint) is not None:
        group.add_argument(*names, dest=s.name, action="extend", nargs="+", metavar=s.metavar, help=text)
    else:
        group.add_argument(*names, dest=s.name, metavar=s.metavar, help=text)


def _default_note(s: Setting) -> str:
    if s.is_required:
        return " (required)"
    # What happens without a value that has no default is for the help text to say.
    return "" if s.default is None else f" (default: {s.default_text})"


def _dashes(word: str) -> str:
    """`--max_model_len=4K` as `--max-model-len=4K`: both spellings are in use."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _epilog(examples: str) -> str:
    note = (
        "Every flag is also an environment variable (--some-flag is OCTAVO_SOME_FLAG) and a key of the YAML file\n"
        "given by --config (some-flag: value). A flag wins over the environment, that over the file."
    )
    return f"examples:\n{examples.strip(chr(10))}\n\n{note}" if examples else note


def read_yaml(path: str, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The keys of a YAML file with '-' read as '_'; UsageError for a file that is no mapping or an unknown key."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: {path!r} cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path!r} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path!r} must hold lines of `key: value`, not a {type(content).__name__}")
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            raise UsageError(
                f"--config: {path!r} has the unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else "")
            )
        values[name] = value
    return values
