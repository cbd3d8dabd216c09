"""Hydra's loader for ptfast's files: the search path, strict reading, and the place of each key.

All private parts of Hydra and OmegaConf that ptfast uses are imported here:

- `ConfigLoaderImpl`: `hydra.compose` does not say which file set which key, and works on global state.
- `ConfigSearchPathImpl`: the search path that this loader takes.
- `create_defaults_list`: lists the files to merge; Hydra's loader adds those of its own section, half of all.
- `Hydra`: runs sweeps and `--cfg hydra` with our own loader; `hydra.main` reads the command line itself.
- `setup_globals`: the resolvers of `${hydra:...}`, which `hydra.main` registers.
- `BasicLauncher`: replaced by one that runs jobs in parallel; a new launcher needs a plugin package.
- `OmegaConfDumper`: quotes text that YAML would read as numbers; OmegaConf's `to_yaml` is ten times slower.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import __version__, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.hydra import Hydra
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import OmegaConfDumper

from ptfast.config.files import paths
from ptfast.config.files.yaml_file import SELF, YamlFile, lineage, read_yaml
from ptfast.config.overrides import parse
from ptfast.config.schema import with_defaults
from ptfast.core.errors import PtfastError, together

__all__ = ["BasicLauncher", "Hydra", "OmegaConfDumper"]

PRIMARY = "config"
_RECIPE = f"{paths.RECIPES}/"


class PtfastSource(ConfigSource):
    """One root of `paths.roots()` as a config source of Hydra."""

    @staticmethod
    def scheme() -> str:
        return "ptfast"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        if file is None:
            raise ConfigLoadError(f"no such option: {config_path}")
        is_recipe = config_path.startswith(_RECIPE)
        content = read_yaml(file, allow_empty=not is_recipe)
        # Hydra expects its `@package` header above all other comments.
        header = self._get_header_dict("\n".join(re.findall(r"(?m)^#\s*@.*$", content.text)))
        data = with_sections(with_defaults(content.data) if config_path == PRIMARY else content.data)
        if "defaults" in data:
            # Reject files that inherit each other: Hydra would follow them in an endless loop.
            lineage(paths.RECIPES if is_recipe else config_path.rpartition("/")[0], file)
        if is_recipe:
            header["package"] = "_global_"
            data = data | {"defaults": _recipe_defaults(content)}
        return ConfigResult(
            provider=self.provider, path=f"ptfast://{self.path}", config=OmegaConf.create(data), header=header
        )

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") != paths.PRESETS and self._folder(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if not self.is_group(config_path):
            return []
        folder, found = self._folder(config_path), set[str]()
        if results_filter in (None, ObjectType.GROUP):
            found |= {f.name for f in folder.iterdir() if f.is_dir() and f.name != paths.PRESETS}
            if not config_path.strip("/") and self._folder(paths.RECIPES).is_dir():
                found.add(paths.RECIPES)
        if results_filter in (None, ObjectType.CONFIG):
            found |= {f.stem for f in folder.glob("*.yaml")}
        return sorted(found)

    def file(self, config_path: str) -> Path | None:
        """Return the file of Hydra's `group/option`, or None if this root has none."""
        if config_path.startswith(_RECIPE):
            name = config_path.removeprefix(_RECIPE)
            own = self._folder(paths.RECIPES) / f"{name.removesuffix('.yaml')}.yaml"
            if own.is_file():
                return own
            given = paths.recipe_file(name)
            return given if given and Path(self.path) == paths.builtin_root().conf else None
        if config_path.removesuffix(".yaml") == PRIMARY and Path(self.path) != paths.builtin_root().conf:
            # A conf/config.yaml in the working folder belongs to some other program.
            return None
        file = Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        return file if file.is_file() else None

    def _folder(self, config_path: str) -> Path:
        if config_path.strip("/") == paths.RECIPES:
            return next(root.recipes for root in paths.roots() if root.conf == Path(self.path))
        return Path(self.path) / config_path.strip("/")


def with_sections(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the config with `task: NAME`, or a task by `_target_`, expanded to a section with a name."""
    task = tree.get("task")
    if task is None or (isinstance(task, dict) and "_target_" not in task):
        return tree
    options = dict(task) if isinstance(task, dict) else {}
    return {**tree, "task": {"name": options.pop("_target_", task), **options}}


def _recipe_defaults(content: YamlFile) -> list[Any]:
    """Return a recipe's defaults as overrides of the primary config's, which work from any folder."""
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
                paths.check_option(group, option, groups, place)
            except PtfastError as error:
                errors.append(error)
            # The primary config chooses an option of every group except the user's own.
            adds = group in own_groups and group not in before
            entry = {f"{'' if adds else 'override '}/{group}": option}
        elif isinstance(entry, str) and entry != SELF:
            place = content.places.get(f"defaults.{index}")
            file = paths.find_recipe(entry, place, folder=content.path.parent)
            for base in lineage(paths.RECIPES, file):
                before |= {*base.choices}
            # Hydra takes a name literally only in a list: elsewhere `./mine.yaml` would be in a group, `/`
            # would start one, and `@` a package.
            entry = {f"/{paths.RECIPES}": [str(file)]}
        result.append(entry)
    if errors:
        raise together(errors)
    return result


class TracingLoader(ConfigLoaderImpl):
    """Hydra's loader, which also records the files in the order in which they are merged."""

    def __init__(self) -> None:
        if __version__.startswith("1.3."):
            # Hydra 1.3 behaves like 1.1 by default; later versions have only one behavior.
            version.setbase("1.3")
        setup_globals()
        Plugins.instance().register(PtfastSource)
        search_path = ConfigSearchPathImpl()
        search_path.append("hydra", "pkg://hydra.conf")
        for root in paths.roots():
            if root.conf.is_dir() or root.recipes.is_dir():
                own = root != paths.builtin_root()
                search_path.append("user" if own else "main", f"ptfast://{root.conf}")
        for plugin in Plugins.instance().discover(SearchPathPlugin):
            plugin().manipulate_search_path(search_path)  # pyright: ignore[reportAttributeAccessIssue]
        search_path.append("schema", "structured://")
        super().__init__(search_path)
        self.files: list[tuple[str, YamlFile]] = []

    def load_options(self, chosen: list[str]) -> DictConfig:
        """Compose the config of the chosen options, without Hydra's own section."""
        parsed, repo = self._parse_overrides_and_create_caching_repo(PRIMARY, chosen)
        found = create_defaults_list(repo, PRIMARY, parsed, prepend_hydra=False, skip_missing=False)
        config = self._compose_config_from_defaults_list(found.defaults, repo)
        self._apply_overrides_to_config(found.config_overrides, config)
        return config

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        config_path = default.config_path or ""
        for source in repo.get_sources():
            if isinstance(source, PtfastSource) and (file := source.file(config_path)):
                package = default.package or result.header["package"] or ""
                if config_path.startswith(_RECIPE):
                    package = ""
                self.files.append((package.replace("_global_", ""), read_yaml(file, allow_empty=True)))
                break
        return result

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        # Several options of a group would override each other: each gets a section of its own, with the
        # files that it inherits.
        parents = {each.config_path: each.parent for each in defaults if not each.is_self}
        for group in paths.SEVERAL:
            inside = [each for each in defaults if (each.config_path or "").startswith(f"{group}/")]
            chosen: dict[str | None, str] = {}
            for each in inside:
                option = each.config_path
                while (parent := parents.get(option)) and parent.startswith(f"{group}/"):
                    option = parent
                chosen[each.config_path] = str(option).rpartition("/")[2]
            if len({*chosen.values()}) > 1:
                for each in inside:
                    each.package = f"{group}.{chosen[each.config_path]}"
        return super()._compose_config_from_defaults_list(defaults, repo)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        # Sweepers with their own search space pass plain `key=value`, which Hydra rejects for keys that no
        # option file lists.
        return super().load_sweep_config(master_config, [a.text for a in parse(sweep_overrides)])

    def places(self) -> dict[str, str]:
        """Return `file:line` of every key in the files loaded so far; later files override earlier ones."""
        result: dict[str, str] = {}
        for package, file in self.files:
            prefix = f"{package}." if package else ""
            if package:
                result[package] = paths.shown(file.path)
            result |= {
                prefix + key: place for key, place in file.places.items() if key.split(".")[0] != "defaults"
            }
        return result
