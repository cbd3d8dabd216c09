"""Tables: a CSV or Parquet file of numbers and categories, one column of which is the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import DataInfo
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.map_source import TensorSource
from ptfast.data.tables.columns import Rows, read_splits
from ptfast.data.tables.preparation import MISSING, Preparation, read_targets


class Table(ReadsAsKnown):
    """Rows of a CSV or Parquet file: numbers, dates and categories, and a target to predict.

    A column is numeric if all its values are numbers, a date if all are ISO dates (then days since 1970), and
    categorical otherwise. Missing numbers become the median of the training rows, and an extra input flags
    them. Categories become numbers, which come last in the input; `model=mlp` embeds them. The preparation is
    fitted to the training rows, saved with the run and applied by `predict`.

    Args:
        path: `.csv` or `.tsv` whose first line names the columns, or `.parquet`.
        target: the column to predict. Text and up to 20 distinct whole numbers are classes, other numbers are
            regression targets; `task=classification` or `task=regression` overrides this.
        val_path, test_path: files of the same columns; without the first, `data.val` of the rows is held out.
        ignore: columns to leave out.
        categorical: columns whose numbers are names, such as postal codes.

    Raises:
        DataError: D001 to D005 by `load`, naming file, row and column.
    """

    name = "table"
    splits_itself = True

    def __init__(
        self,
        path: str,
        target: str,
        val_path: str | None = None,
        test_path: str | None = None,
        ignore: Sequence[str] = (),
        categorical: Sequence[str] = (),
    ) -> None:
        self.paths = {"train": path, "val": val_path, "test": test_path}
        self.target, self.ignore, self.categorical = target, ignore, categorical

    def load(self, *, val: Duration, seed: int) -> Splits:
        rows = read_splits(self.paths)
        rows["train"].check("data.ignore", *self.ignore)
        rows["train"].check("data.categorical", *self.categorical)
        for each in rows.values():
            each.check("data.target", self.target)
        # The preparation must not see held-out rows.
        rows |= self._split(rows, val, seed)
        notes = list[str]()
        if self.known is not None:
            preparation = Preparation.from_facts(self.known.extra["table"]["columns"])
        else:
            names = [
                n for n in rows["train"].columns if n not in (self.target, self.rules.group, *self.ignore)
            ]
            preparation, notes = Preparation.fit(rows["train"].columns, names, self.categorical)
            if not preparation.width:
                why = "; ".join(notes) or "all are ignored"
                what = f"no column other than {self.target} differs between rows: {why}"
                raise DataError("D005", what, key="data.path", value=self.paths["train"])
        inputs = {split: preparation(each.columns, each.file, each.numbers) for split, each in rows.items()}
        for split, each in rows.items():
            if split != "train" and (unknown := preparation.unknown(inputs[split], each.columns)):
                notes.append(f"{split} has categories that training does not have: {unknown}")
        info, targets = read_targets(rows, self.target, task=self.task, known=self.known)
        if info["task"] == "regression":
            train = targets["train"].double()
            info["target_scale"] = (float(train.mean()), float(train.std(correction=0)) or 1.0)
        facts = {
            "columns": preparation.facts(),
            "missing": sorted(MISSING),
            "delimiter": rows["train"].delimiter,
            "target": self.target,
        }
        info = DataInfo(
            kind="features",
            input_shape=(preparation.width,),
            categories=preparation.sizes or None,
            extra={"table": facts, "normalize": preparation.statistics(inputs["train"])},
            **info,
        )
        counts = f"{len(preparation.numbers)} numeric and {len(preparation.categories)} categorical columns"
        sources = {split: TensorSource(torch.from_numpy(inputs[split]), targets[split]) for split in rows}
        return Splits.of(info, sources, "; ".join([counts, *notes]))

    def _split(self, rows: dict[str, Rows], val: Duration, seed: int) -> dict[str, Rows]:
        """Split held-out rows off the training rows."""
        train, group = rows["train"], self.rules.group
        facts, targets = read_targets({"train": train}, self.target, task=self.task, known=self.known)
        classes = targets["train"].numpy() if facts["task"] == "classification" else None
        train.check("data.group", *filter(None, [group]))
        groups = None if group is None else train.columns[group]
        if "test" in rows:
            self.rules.reject("this data has a test split of its own", "test")
        parts = self.rules.apply(len(train.numbers), None if "val" in rows else val, seed, classes, groups)
        return {split: train.take(places.tolist()) for split, places in parts.items()}
