"""Code, spans and command lines that the README and docs/ show; and a user's folder for them."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT

from ptfast.config.files.paths import CONFIG_DIR

FILES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Shown(NamedTuple):
    """A command line on a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{Path(self.page).stem}: {' '.join(self.words)}"[:100]


def fences(pages: str | Sequence[str], language: str) -> list[str]:
    """The blocks of code in `language` on a page, or on several."""
    texts = [PAGES[page] for page in ([pages] if isinstance(pages, str) else pages)]
    return [code for text in texts for kind, code in FENCE.findall(text) if kind == language]


def spans(page: str) -> list[str]:
    """The code within the text of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page]))


def shown_commands() -> Iterator[Shown]:
    """Every `ptfast` and `-m ptfast` command line, without its comment."""
    for page in PAGES:
        blocks = [text for kind in ("", "bash") for text in fences(page, kind)]
        lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
        for line in [*lines, *spans(page)]:
            command = re.match(r"(?:.*-m )?ptfast (?=[a-z-])(.*)", line)
            if command:
                yield Shown(page, tuple(shlex.split(command[1], comments=True)))


TUTORIALS = tuple(page for page in PAGES if page.startswith("docs/start/tutorial-"))
"""The pages whose commands are given one after another, in one folder."""
COMMANDS_SHOWN = sorted(
    {shown.words: shown for shown in shown_commands() if shown.page not in TUTORIALS}.values()
)
"""Each once, whatever pages show it; those of tutorials have tests of their own."""
OWN_PARTS = tuple(page for page in PAGES if page.startswith("docs/how-to/custom-parts/"))
"""The pages of which every example is trained."""
OWN_CONF = "docs/how-to/operate/project-layout.md"
"""The page whose commands are given in a folder with a conf of its own."""
TASKS = tuple(page for page in PAGES if page.startswith("docs/how-to/models/") and fences(page, "python"))
"""The pages whose examples are modules, named in their first lines."""
FORMS = {"FILE", "NAME", "RUN", "WORDS", "..."}
"""Words that stand for what a reader has: such a command cannot be given as it stands."""


def form(shown: Shown) -> bool:
    """Return True for a command that only shows how one is made: no words, or some that stand for others."""
    return len(shown.words) == 1 or bool(FORMS & {*shown.words})


def points(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Configs of a sweep in which each choice of `key=a,b` is made once."""
    choices = []
    for word in words:
        key, equals, value = word.partition("=")
        whole = not equals or value.startswith(("[", "{", "'"))
        choices.append([word] if whole else [f"{key}={one}" for one in value.split(",")])
    length = max(map(len, choices))
    return list(zip(*[(choice * length)[:length] for choice in choices], strict=True))


TRAINING = [shown for shown in COMMANDS_SHOWN if shown.words[0] == "train" and not form(shown)]
SMALL = (
    "recipe=resnet_digits",
    "recipe=char_gpt",
    "data=arrays",
    "debug=gradcheck",
    "data._target_=mine.Rings",
)
_QUICK = [shown for shown in TRAINING if {*SMALL} & {*shown.words}]
DRY_RUN = [
    *{shown.page: shown for shown in _QUICK if shown.page != OWN_CONF}.values(),
    *(shown for shown in TRAINING if shown.page == OWN_CONF),
]
"""Those of which the everyday tests take some steps: one of each page that has some with quick steps."""


@contextlib.contextmanager
def users_folder(folder: Path) -> Iterator[Path]:
    """Work in `folder` with what the commands on the pages name: modules and recipes."""
    code = fences((*OWN_PARTS, "docs/how-to/data/streams.md"), "python")
    files = {"mine.py": "\n".join(code)} | {code.split()[1]: code for code in fences(TASKS, "python")}
    for name, text in files.items():
        (folder / name).write_text(text)
    for text in fences(("docs/concepts/configuration.md", *OWN_PARTS, OWN_CONF), "yaml"):
        if name := re.match(r"# ([\w/]+\.yaml)", text):
            (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / name[1]).write_text(text)
    found = "defaults:\n  - resnet_digits\n\noptimizer:\n  lr: 0.0076\n"
    for name in ("found.yaml", "shared/conf/recipes/ours.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(found)
    with pytest.MonkeyPatch.context() as patch:
        # The flag --config-dir sets it.
        patch.setenv(CONFIG_DIR, "")
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for name in files:
            patch.delitem(sys.modules, Path(name).stem, raising=False)
        yield folder
        for name in files:
            sys.modules.pop(Path(name).stem, None)
