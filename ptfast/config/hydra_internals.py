"""Private names of Hydra and OmegaConf that are needed here, each with its reason.

- `ConfigLoaderImpl`: composing; `hydra.compose` does not say which file set which key, works on global state,
  and registers the folders of configs for the whole process. Of its methods, `_load_single_config` and
  `_compose_config_from_defaults_list` are overridden, and `_apply_overrides_to_config` lays values over
  options that were merged before.
- `ConfigSearchPathImpl`: the search path that this loader takes.
- `Hydra`: sweeps, `--cfg` and `--info` with a loader of our own; `hydra.main` reads the command line itself.
- `setup_globals`: the resolvers of `${hydra:...}`, which `hydra.main` registers.
- `BasicLauncher`: jobs that run at a time; a launcher of one's own takes a package of plugins.
- `OmegaConfDumper`: quotes texts that would be read as numbers; OmegaConf's `to_yaml` is ten times as slow.
"""

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.hydra import Hydra
from hydra.core.utils import setup_globals
from omegaconf._utils import OmegaConfDumper

__all__ = [
    "BasicLauncher",
    "ConfigLoaderImpl",
    "ConfigSearchPathImpl",
    "Hydra",
    "OmegaConfDumper",
    "setup_globals",
]
