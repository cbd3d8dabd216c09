"""Detection of secret values in a config, and their removal from messages and files."""

from __future__ import annotations

import difflib
import os
import re

SECRET = "<secret>"
_SECRET_KEYS = {
    *("password", "passwd", "secret", "token", "api_key", "api_token", "access_key", "secret_key", "auth"),
    *("auth_token", "access_token", "authorization", "bearer", "cookie", "credential", "credentials"),
    "headers",
}
"""Matched as complete names, so that our keys such as `data.text_key` and `model.cls_token` do not match."""
_KEPT_SECRET: set[str] = set()
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CREDENTIALS = re.compile(
    r"(?<=://)(?![^\s/]*\$\{oc\.env:)[^\s/]+(?=@)"
    r"|(?<=[?&])(?P<name>[\w-]*(?:sig|token|key|secret|passw|credential|auth)[\w-]*=)(?!\$\{oc\.env:)"
    r"[^\s&'\"]*[^\s&'\":.,)]",
    re.IGNORECASE,
)
"""User name and password before a URL's host, and signatures in its query."""


def is_secret(key: str, *, misspelt: bool = False) -> bool:
    """Return True if a key names a secret (`token`, `apiKey`), or with `misspelt` resembles such a name."""
    name = "_".join(word.lower() for word in _WORD.findall(key.rpartition(".")[2]))
    return name in _SECRET_KEYS or (misspelt and bool(difflib.get_close_matches(name, _SECRET_KEYS, 1, 0.75)))


def keep_secret(value: str) -> None:
    """Hide a value in all later messages and files, unless it is short or an existing path."""
    if len(value) >= 6 and not os.path.exists(value):  # noqa: PTH110
        _KEPT_SECRET.add(value)


def hide_credentials(text: str) -> str:
    """Return `text` with secret values and the credentials in URLs replaced."""
    for value in _KEPT_SECRET:
        text = text.replace(value, SECRET)
    return _CREDENTIALS.sub(lambda match: f"{match['name'] or ''}{SECRET}", text) if "://" in text else text
