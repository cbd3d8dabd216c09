"""Held-out samples, folds and fractions: their counts by class and by group, and what is rejected."""

from __future__ import annotations

import numpy as np
import pytest

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.sampling.splits import SplitRules

TENTH, NONE = Duration(10, "percent"), Duration(0, "percent")
RARE = np.repeat([0, 1, 2], [200, 200, 3])


@pytest.mark.parametrize("seed", range(50))
def test_a_rare_class_is_in_train_and_in_val(seed: int):
    parts = SplitRules().apply(403, TENTH, seed, RARE)
    assert np.bincount(RARE[parts["train"]]).tolist() in ([180, 181, 2], [181, 180, 2])
    assert (np.bincount(RARE[parts["val"]]) > 0).all()
    assert sorted([*parts["train"], *parts["val"]]) == list(range(403))
    assert not np.array_equal(parts["val"], SplitRules().apply(403, TENTH, seed + 50, RARE)["val"])


def test_class_counts_are_those_of_scikit_learn():
    # StratifiedShuffleSplit(test_size=30).split(...) of scikit-learn 1.9 holds out [13, 10, 6, 1].
    classes = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], [130, 100, 60, 10]))
    parts = SplitRules(split="stratified").apply(300, Duration(30, "samples"), 0, classes)
    assert np.bincount(classes[parts["val"]]).tolist() == [13, 10, 6, 1]


@pytest.mark.parametrize("seed", range(5))
def test_folds_hold_each_sample_once_and_the_classes_in_proportion(seed: int):
    sizes = np.array([23, 58, 7, 12])
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(4), sizes))
    folds = [SplitRules(folds=5, fold=fold).apply(100, TENTH, seed, classes) for fold in range(5)]
    assert sorted(np.concatenate([fold["val"] for fold in folds])) == list(range(100))
    counts = np.stack([np.bincount(classes[fold["val"]], minlength=4) for fold in folds])
    # As StratifiedKFold: what each fifth sample of the sorted classes is.
    expected = np.stack([np.bincount(np.sort(classes)[fold::5], minlength=4) for fold in range(5)])
    assert (counts == expected).all()
    assert {len(fold["train"]) for fold in folds} == {80}
    assert all(np.bincount(classes[fold["train"]], minlength=4).all() for fold in folds)


def test_the_only_sample_of_a_class_is_trained_on_in_every_fold():
    classes = np.repeat([0, 1, 2], [10, 9, 1])
    folds = [SplitRules(folds=5, fold=fold).apply(20, TENTH, 3, classes) for fold in range(5)]
    assert all(19 in fold["train"] for fold in folds)
    assert sorted(np.concatenate([fold["val"] for fold in folds])) == list(range(19))


def test_no_group_is_in_two_folds_and_folds_are_of_one_size():
    sizes = [30, 20, 20, 11, 10, 5, 2, 2]
    groups = np.random.default_rng(0).permutation(np.repeat(list("abcdefgh"), sizes))
    rules = [SplitRules(group="patient", folds=3, fold=fold) for fold in range(3)]
    folds = [groups[rule.apply(100, TENTH, 0, groups=groups)["val"]] for rule in rules]
    assert sum(len({*fold}) for fold in folds) == 8
    # As GroupKFold(3) of scikit-learn 1.9.
    assert sorted(map(len, folds)) == [32, 33, 35]


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_held_out_as_a_whole(seed: int):
    groups = np.random.default_rng(1).integers(0, 40, 300)
    parts = SplitRules(group="patient").apply(300, Duration(20, "percent"), seed, groups=groups)
    assert not {*groups[parts["train"]]} & {*groups[parts["val"]]}
    assert 52 <= len(parts["val"]) <= 68


def test_a_group_of_half_the_samples_is_not_held_out_for_a_tenth():
    groups = np.repeat([0, 1, 2, 3, 4, 5], [50, 10, 10, 10, 10, 10])
    for seed in range(10):
        assert len(SplitRules(group="g").apply(100, TENTH, seed, groups=groups)["val"]) == 10


@pytest.mark.parametrize("seed", range(20))
def test_a_random_split_keeps_a_sample_of_each_class_in_train(seed: int):
    # 60 % are held out: without care, train has none of the rare classes in most draws.
    classes, rules, val = (
        np.array([0] * 40 + [1] * 2 + [2] + [3] * 2),
        SplitRules("random"),
        Duration(60, "percent"),
    )
    parts = rules.apply(45, val, seed, classes)
    assert sorted([*parts["train"], *parts["val"]]) == list(range(45))
    assert len(parts["val"]) == 27
    assert {*classes[parts["train"]]} == {0, 1, 2, 3}
    # Where each class keeps a sample anyway, the split is what it is without classes.
    common = rules.apply(45, val, seed, np.arange(45) % 3)
    assert np.array_equal(common["val"], rules.apply(45, val, seed)["val"])


def test_a_random_split_of_recorded_results_stays():
    assert SplitRules("random").apply(20, Duration(4, "samples"), 7)["val"].tolist() == [1, 3, 7, 19]


def test_more_classes_than_training_samples_are_split_all_the_same():
    parts = SplitRules().apply(10, Duration(80, "percent"), 0, np.arange(10))
    assert (len(parts["train"]), len(parts["val"])) == (2, 8)


def test_more_classes_than_held_out_samples_leave_out_the_rarest():
    classes = np.repeat(np.arange(5), [40, 30, 20, 5, 5])
    held = SplitRules().apply(100, Duration(3, "samples"), 0, classes)["val"]
    assert np.bincount(classes[held], minlength=5).tolist() == [1, 1, 1, 0, 0]


def test_a_fraction_keeps_the_classes_in_proportion_and_val_as_it_is():
    whole = SplitRules().apply(403, TENTH, 0, RARE)
    part = SplitRules(fraction=TENTH).apply(403, TENTH, 0, RARE)
    assert np.array_equal(whole["val"], part["val"])
    assert {*part["train"]} <= {*whole["train"]}
    assert sorted(np.bincount(RARE[part["train"]]).tolist()) == [1, 17, 18]
    counted = SplitRules(fraction=Duration(50, "samples")).apply(403, NONE, 0, RARE)
    assert (list(counted), len(counted["train"])) == (["train"], 50)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (SplitRules(folds=21), "data.folds=21: cannot be made of 20 samples. Use data.folds=20 or fewer"),
        (SplitRules(group="site", folds=3), "data.folds=3: cannot be made of 2 groups"),
        (SplitRules(group="site"), "holds out 2 samples, and the smallest of 2 groups has 10"),
        (SplitRules(fraction=Duration(2, "percent")), "data.fraction=2%: keeps 0 of 18 training samples"),
        (SplitRules(fraction=Duration(1, "samples")), "keeps 1 of 18 training samples of 2 classes"),
        (SplitRules(fraction=Duration(19, "samples")), "keeps 19 of 18 training samples"),
    ],
)
def test_what_leaves_a_split_or_a_class_empty_is_rejected(rules: SplitRules, words: str):
    groups = np.repeat(["a", "b"], 10) if rules.group else None
    with pytest.raises(DataError) as error:
        rules.apply(20, TENTH, 0, np.arange(20) % 2, groups)
    assert error.value.code == "D006"
    assert words in str(error.value)


@pytest.mark.parametrize("rules", [SplitRules(folds=5), SplitRules(group="site")])
def test_folds_and_groups_beside_a_given_val_split_are_rejected(rules: SplitRules):
    with pytest.raises(ConfigError, match="has a val split of its own"):
        rules.apply(20, None, 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_test_split_has_each_class_and_is_the_same_in_every_fold(seed: int):
    fifth = Duration(20, "percent")
    parts = SplitRules(test=fifth).apply(403, TENTH, seed, RARE)
    assert {split: np.bincount(RARE[part]).tolist() for split, part in parts.items()}["test"] in (
        [40, 40, 1],
        [41, 39, 1],
        [39, 41, 1],
    )
    assert [len(parts["train"]), len(parts["val"]), len(parts["test"])] == [282, 40, 81]
    assert sorted(np.concatenate([*parts.values()])) == list(range(403))
    assert all(np.bincount(RARE[part], minlength=3).all() for part in parts.values())
    folds = [SplitRules(test=fifth, folds=4, fold=fold).apply(403, TENTH, seed, RARE) for fold in range(4)]
    assert all(np.array_equal(fold["test"], parts["test"]) for fold in folds)
    held = np.concatenate([parts["test"], *(fold["val"] for fold in folds)])
    # The only sample of a class that the test leaves may stay in train.
    assert 402 <= len(np.unique(held)) == len(held)


def test_no_group_of_the_test_split_is_in_another():
    groups = np.random.default_rng(1).integers(0, 40, 300)
    for val in (TENTH, None):
        rules = SplitRules(test=TENTH, group="patient")
        parts = [{*groups[part]} for part in rules.apply(300, val, 0, groups=groups).values()]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 40


def test_a_test_split_that_leaves_too_little_is_named():
    with pytest.raises(DataError, match=r"data.test=20samples: holds out 20 of 20 training samples"):
        SplitRules(test=Duration(20, "samples")).apply(20, TENTH, 0)
    with pytest.raises(DataError, match=r"data.val=.*: holds out 10 of 10 training samples"):
        SplitRules(test=Duration(10, "samples")).apply(20, Duration(10, "samples"), 0)


def test_samples_without_a_group_and_unknown_classes_are_rejected():
    with pytest.raises(DataError, match="does not name a group for each of the 20 samples"):
        SplitRules(group="site").apply(20, TENTH, 0, groups=["a", None] * 10)
    with pytest.raises(ConfigError, match="no classes that are known"):
        SplitRules(split="stratified").apply(20, TENTH, 0)
