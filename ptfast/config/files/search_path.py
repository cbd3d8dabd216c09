"""Option files and recipes as Hydra's search path, read strictly; recipes are the group `recipe`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from ptfast.config.checks.options import check_option
from ptfast.config.files import paths
from ptfast.config.files.lineage import SELF, base_file, chosen_groups, lineage
from ptfast.config.files.yaml_file import YamlFile, read_yaml
from ptfast.config.hydra_internals import ConfigSearchPathImpl
from ptfast.config.schema import with_defaults
from ptfast.core.errors import PtfastError, together

PRIMARY = "config"


class PtfastSource(ConfigSource):
    """One root of `paths.roots()` as Hydra sees it."""

    @staticmethod
    def scheme() -> str:
        return "ptfast"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        if file is None:
            raise ConfigLoadError(f"no such option: {config_path}")
        group = paths.RECIPES if _is_recipe(config_path) else config_path.rpartition("/")[0]
        content = read_yaml(file, allow_empty=group != paths.RECIPES)
        # Hydra looks for it above all other comments.
        header = self._get_header_dict("\n".join(re.findall(r"(?m)^#\s*@.*$", content.text)))
        data = with_sections(with_defaults(content.data) if config_path == PRIMARY else content.data)
        if "defaults" in data:
            # Files that inherit each other would keep Hydra going round.
            lineage(group, file)
        if group == paths.RECIPES:
            header["package"] = "_global_"
            data = data | {"defaults": _recipe_defaults(content)}
        return ConfigResult(
            provider=self.provider, path=f"ptfast://{self.path}", config=OmegaConf.create(data), header=header
        )

    def is_group(self, config_path: str) -> bool:
        folder = self._folder(config_path)
        return folder is not None and folder.is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = self._folder(config_path)
        if folder is None or not folder.is_dir():
            return []
        found: set[str] = set()
        if results_filter in (None, ObjectType.GROUP):
            found |= {f.name for f in folder.iterdir() if f.is_dir() and f.name != paths.PRESETS}
            if not config_path.strip("/") and self._recipes().is_dir():
                found.add(paths.RECIPES)
        if results_filter in (None, ObjectType.CONFIG):
            found |= {f.stem for f in folder.glob("*.yaml")}
        return sorted(found)

    def file(self, config_path: str) -> Path | None:
        """The file behind Hydra's `group/option`, or None where this root has none."""
        if _is_recipe(config_path):
            name = config_path.removeprefix(f"{paths.RECIPES}/")
            own = self._recipes() / f"{name.removesuffix('.yaml')}.yaml"
            if own.is_file():
                return own
            given = paths.recipe_file(name)
            return given if given and Path(self.path) == paths.builtin_root().conf else None
        if config_path.removesuffix(".yaml") == PRIMARY and Path(self.path) != paths.builtin_root().conf:
            # A conf/config.yaml in the working folder belongs to some other program.
            return None
        file = Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        return file if file.is_file() else None

    def _recipes(self) -> Path:
        return next(
            (r.recipes for r in paths.roots() if r.conf == Path(self.path)), Path(self.path) / "recipes"
        )

    def _folder(self, config_path: str) -> Path | None:
        group = config_path.strip("/")
        if group == paths.RECIPES:
            return self._recipes()
        return None if group == paths.PRESETS else Path(self.path) / group


def search_path() -> ConfigSearchPathImpl:
    """Hydra's own options, the user's and the package's folders, and those that plugins add."""
    Plugins.instance().register(PtfastSource)
    result = ConfigSearchPathImpl()
    result.append("hydra", "pkg://hydra.conf")
    for root in paths.roots():
        if root.conf.is_dir() or root.recipes.is_dir():
            own = root != paths.builtin_root()
            result.append("user" if own else "main", f"ptfast://{root.conf}")
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(result)  # pyright: ignore[reportAttributeAccessIssue]
    result.append("schema", "structured://")
    return result


def with_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """A config in which `task: NAME`, or a task by `_target_`, is written out as a section with a name."""
    task = tree.get("task")
    if isinstance(task, dict) and "_target_" in task:
        task = {"name": task["_target_"], **{key: value for key, value in task.items() if key != "_target_"}}
    elif task is None or isinstance(task, dict):
        return tree
    return {**tree, "task": task if isinstance(task, dict) else {"name": task}}


def _is_recipe(config_path: str) -> bool:
    return config_path.startswith(f"{paths.RECIPES}/")


def _recipe_defaults(content: YamlFile) -> list[Any]:
    """A recipe's defaults in words that mean the same to Hydra wherever the recipe lies.

    Choices of options become overrides of the primary config's, so that `data: cifar10` will do, and recipes
    that it inherits are named from the root: `./mine.yaml` would else lie in a group, and `/` begin one.
    """
    defaults = content.data.get("defaults", [])
    if not isinstance(defaults, list):
        return defaults
    groups, own_groups = set(paths.groups()), set(paths.own_groups())
    before: set[str] = set()
    result: list[Any] = []
    errors: list[PtfastError] = []
    for index, entry in enumerate(defaults):
        if isinstance(entry, dict) and len(entry) == 1:
            written, option = next(iter(entry.items()))
            group = str(written).removeprefix("override ").strip().lstrip("/")
            if group.startswith("hydra/"):
                result.append(entry)
                continue
            place = content.places.get(f"defaults.{index}")
            try:
                check_option(group, option, groups, place)
            except PtfastError as error:
                errors.append(error)
            # The primary config chooses an option of every group but the user's own.
            adds = group in own_groups and group not in before
            entry = {f"{'' if adds else 'override '}/{group}": option}
        elif isinstance(entry, str) and entry != SELF:
            file = base_file(paths.RECIPES, entry, content)
            before |= chosen_groups(lineage(paths.RECIPES, file)) if file else set()
            # In a list Hydra takes a name as it is, and finds no package behind an `@`.
            entry = {f"/{paths.RECIPES}": [str(file)]}
        result.append(entry)
    if errors:
        raise together(errors)
    return result
