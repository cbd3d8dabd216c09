"""The frozen config of a run: written without secrets, and read back as the same tree."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ptfast.config.checks.former_keys import drop_gone, rename_former
from ptfast.config.checks.interpolations import ENV, resolve_keeping_env
from ptfast.config.checks.rules import losing_length
from ptfast.config.checks.trust import check_reach
from ptfast.config.compose import Composed, apply, finish, place_of, value_of
from ptfast.config.files.yaml_file import read_yaml
from ptfast.config.hydra_loader import OmegaConfDumper, with_sections
from ptfast.config.schema import VARIABLES, RunOptions
from ptfast.core.errors import ConfigError
from ptfast.core.run_directory import DIGESTS, write_json, write_text
from ptfast.core.run_records import Digests, read_known
from ptfast.core.sections.secret_values import SECRET, hide_credentials, is_secret


class _Dumper(yaml.Dumper if TYPE_CHECKING else getattr(yaml, "CDumper", yaml.Dumper)):
    """Writes YAML like OmegaConf, whose pure-Python dumper takes ten times as long as libyaml's."""


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


def freeze(composed: Composed, path: Path) -> list[str]:
    """Write the config with which `ptfast train --config PATH` repeats the run; return warnings.

    Interpolations are replaced by their values, except `${oc.env:X}`. Other secrets (each with a
    warning), the run's folder and the checkpoint it resumed from are left out.
    """
    tree, hidden = frozen_tree(composed)
    ours = {key: RunOptions.model_fields[key].default for key in ("dir", "resume")}
    tree["run"] = {**tree.get("run", {}), **ours}
    text = yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    start = f"# The whole config of this run. Repeat it: ptfast train --config {path.name}\n"
    write_text(path, start + text)
    path.with_name(DIGESTS).unlink(missing_ok=True)
    if hidden:
        salt = secrets.token_hex(16)
        digests = {key: digest_of(value, salt) for key, value in hidden.items()}
        write_json(path.with_name(DIGESTS), {"salt": salt, "digests": digests})
    return [
        f"{key} ({composed.place(key)}): not written to the run's files. "
        f"Give it as {key}='${{oc.env:NAME}}' so that the run can be repeated"
        for key in hidden
    ]


def digest_of(value: Any, salt: str) -> str:
    """Return a digest for comparing a secret; slow to compute, so that it cannot be guessed in bulk."""
    text = json.dumps(value, default=str).encode()
    return hashlib.scrypt(text, salt=bytes.fromhex(salt), n=2**14, r=8, p=1).hex()


def changed_secrets(folder: Path, tree: dict[str, Any]) -> list[str]:
    """Return the keys of secrets whose values in `tree` differ from those of the run in `folder`."""
    known = read_known(folder / DIGESTS, Digests)
    changed = []
    for key, digest in known.get("digests", {}).items():
        value: Any = None
        with contextlib.suppress(LookupError, TypeError, ValueError):
            value = value_of(tree, key)
        if digest_of(value, known.get("salt", "")) != digest:
            changed.append(key)
    return changed


def check_no_secrets(composed: Composed) -> None:
    """Raise C011 for a plaintext secret: ranks that read the frozen config would not get it."""
    for key in frozen_tree(composed)[1]:
        what = "the ranks read the run's config.yaml, and a secret is not written there"
        hint = f"Give it as {key}='${{oc.env:NAME}}'"
        raise ConfigError("C011", what, key=key, value=SECRET, place=composed.place(key), suggestion=hint)


def frozen_tree(composed: Composed, *, resolved: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tree that `freeze` writes, or the unresolved tree, and the secrets hidden in it, by key."""
    hidden: dict[str, Any] = {}

    def hide(value: Any, key: str) -> Any:
        if isinstance(value, dict) and not is_secret(key):
            return {name: hide(item, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
        if isinstance(value, list) and not is_secret(key):
            return [hide(item, f"{key}.{index}") for index, item in enumerate(value)]
        with_credentials = isinstance(value, str) and hide_credentials(value) != value
        if not (is_secret(key) or with_credentials) or value in (None, "") or isinstance(value, bool):
            return value
        if isinstance(value, str) and (value == SECRET or ENV.fullmatch(value)):
            return value
        hidden[key] = value
        return SECRET

    tree = composed.tree_unresolved
    if resolved:
        # Variables have been replaced by their values: no key refers to them any more.
        tree = resolve_keeping_env(composed.tree, tree)
        tree = {key: value for key, value in tree.items() if key in composed.tree} | {VARIABLES: {}}
    if tree.get("epochs") is not None and tree.get("steps") is not None:
        # One file with both would no longer show which of the two overrides the other.
        tree = {**tree, loser: None} if (loser := losing_length(composed.place)) else tree
    return hide(tree, ""), hidden


def load(
    path: Path,
    arguments: Sequence[str] = (),
    *,
    complete: bool = True,
    trusted: bool = True,
    trains: bool = True,
) -> Composed:
    """Load a whole config from one file and apply arguments; for flags see `compose` and `load_config`."""
    content = read_yaml(path)
    rename_former(content.data)
    if not trains:
        drop_gone(content.data)
    tree, places = apply(with_sections(content.data), content.places, arguments)
    if not trusted:
        check_reach(tree, lambda key: place_of(key, places), trains=trains)
    return finish(tree, places, content.warnings, arguments, complete=complete)


_INLINE = re.compile(
    r"""(?P<key>[\w.-]+)(?P<colon>['"]?\s*:\s*)(?P<value>\$\{[^}]*\}|'[^']*'|"[^"]*"|[^,{}\[\]]+)"""
)


def redact(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked, for files about the run."""

    def redact_inline(match: re.Match[str]) -> str:
        secret = is_secret(match["key"]) and not ENV.fullmatch(match["value"].strip())
        return f"{match['key']}{match['colon']}{SECRET}" if secret else match[0]

    result: list[str] = []
    hide_next = False
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if hide_next:
            argument = SECRET
        elif equals and is_secret(key.lstrip("+~-")) and not ENV.fullmatch(value.strip("'\"")):
            argument = f"{key}={SECRET}"
        elif equals and "{" in value:
            argument = f"{key}={_INLINE.sub(redact_inline, value)}"
        hide_next = not equals and argument.startswith("--") and is_secret(argument)
        result.append(hide_credentials(argument))
    return result
