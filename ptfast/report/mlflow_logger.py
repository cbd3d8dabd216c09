"""The MLflow logger."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ptfast.core import run_directory
from ptfast.core.errors import import_extra
from ptfast.report.loggers import Record, rejected_by, settings_of, tagged

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
MOST_PARAMS, MOST_CHARS = 100, 500
"""Most parameters in one request, and most characters of a parameter's value on older servers."""


class Mlflow:
    """Logs to MLflow, with settings as parameters. A resumed run continues its MLflow run.

    Args:
        experiment: experiment of the run; created if it does not exist.
        uri: a tracking server, or a database such as `sqlite:///mlflow.db`; null for
            MLFLOW_TRACKING_URI, or else MLflow's own default.
        name: name of the run; default: the last two parts of the run directory's path.
        tags: labels to find it by.
    """

    def __init__(
        self,
        experiment: str = "ptfast",
        uri: str | None = None,
        name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        import_extra("mlflow", "mlflow", "logger", "mlflow")
        self._experiment, self._uri, self._name, self._tags = experiment, uri, name, tags

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param

        known = run_directory.read_json(run_dir / run_directory.MLFLOW).get("run_id")
        # By default, MLflow retries an unreachable server for four minutes before training starts.
        hasty = RETRIES not in os.environ
        os.environ.setdefault(RETRIES, "2")
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=self._uri)
            if known:
                self._run_id = known
                self._client.update_run(known, status="RUNNING")
            else:
                name, tags = self._name or "/".join(run_dir.absolute().parts[-2:]), self._tags
                there = self._client.get_experiment_by_name(self._experiment)
                experiment = (
                    there.experiment_id if there else self._client.create_experiment(self._experiment)
                )
                self._run_id = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
                params = [Param(key, str(value)[:MOST_CHARS]) for key, value in settings_of(config).items()]
                for first in range(0, len(params), MOST_PARAMS):
                    self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])
        except Exception as error:
            hint = "Set logger.uri or MLFLOW_TRACKING_URI to a server that runs, or to sqlite:///mlflow.db"
            raise rejected_by("MLflow", "mlflow", error, hint) from error
        finally:
            if hasty:
                del os.environ[RETRIES]
        run_directory.write_json(run_dir / run_directory.MLFLOW, {"run_id": self._run_id})

    def log(self, record: Record) -> None:
        from mlflow.entities import Metric

        now_ms, step = int(time.time() * 1000), record["step"]
        metrics = [Metric(tag, value, now_ms, step) for tag, value in tagged(record).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
