"""A way to load the training data, as `find workers` tries it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptfast.config.schema import Config


class Loader(NamedTuple):
    """Processes and threads that read, and how far ahead."""

    kind: str
    """As `dataloader.kind`, never `auto`."""
    workers: int = 0
    """Processes of each rank; 0 for kinds without."""
    prefetch: int = 0
    """Micro-batches that each process reads ahead; 0 for kinds without."""
    threads: int = 0
    """Of each process; 0 for kinds without."""
    read_ahead: bool = False
    """A thread prepares the next batch."""

    @property
    def values(self) -> dict[str, Any]:
        """Config values by key, of those that mean something to this kind."""
        found: dict[str, Any] = {"dataloader.kind": self.kind, "dataloader.read_ahead": self.read_ahead}
        if self.workers:
            found |= {
                "dataloader.workers": self.workers,
                "dataloader.prefetch": self.prefetch,
                "backend.worker_threads": self.threads,
            }
        return found

    @property
    def overrides(self) -> tuple[str, ...]:
        """Words that ask for it, and for all that grows at its full size."""
        return ("curriculum=none", *(f"{key}={str(value).lower()}" for key, value in self.values.items()))

    def on(self, config: Config) -> Config:
        """`config` with this loader."""
        updates: dict[str, dict[str, Any]] = {"dataloader": {}, "backend": {}}
        for key, value in self.values.items():
            section, name = key.split(".")
            updates[section][name] = value
        return config.model_copy(
            update={name: getattr(config, name).model_copy(update=update) for name, update in updates.items()}
        )

    def label(self, config: Config) -> str:
        """Its kind, and what else differs from `config`."""
        words = [self.kind]
        if self.workers and self.prefetch != config.dataloader.prefetch:
            words.append(f"prefetch {self.prefetch}")
        if self.workers and self.threads != config.backend.worker_threads:
            words.append(f"{self.threads} thread" + "s" * (self.threads != 1))
        if self.read_ahead:
            words.append("read ahead")
        return ", ".join(words)


def workers(count: int, config: Config) -> Loader:
    """`count` worker processes that read as far ahead as `config` says; for 0 this process reads."""
    if not count:
        return Loader("plain")
    return Loader("workers", count, config.dataloader.prefetch, config.backend.worker_threads)
