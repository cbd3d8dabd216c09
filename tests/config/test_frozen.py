"""The frozen config: the same run when read back, references kept, secrets never written."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml

from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.files.frozen import freeze, load, redact
from ptfast.config.multirun import show_config
from ptfast.config.schema import changed_keys, defaults, flatten
from ptfast.core.errors import ConfigError
from ptfast.core.sections.secret_values import is_secret
from ptfast.core.sections.targets import locate

HARD_VALUES = [
    "run.name='1e-3'",
    "task=no",
    "run.root='12:30'",
    "optimizer.lr=1e-05",
    "data.val=0",
    "model.hidden=[1,2]",
    "stop.metric=null",
    "run.dir='a: b # c'",
    r"device='a\${b}'",
    "trust=['é']",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_frozen_config_reads_back_as_the_same_tree() -> None:
    composed = compose(["recipe=resnet_digits", *HARD_VALUES])
    assert freeze(composed, Path("config.yaml")) == []
    again = load(Path("config.yaml"))
    assert again.tree == composed.tree | {"run": composed.tree["run"] | {"dir": None}}
    assert again.tree["recipe"] == "resnet_digits"
    freeze(again, Path("again.yaml"))
    assert load(Path("again.yaml")).tree == again.tree


def test_the_folder_of_a_run_is_not_that_of_its_repetition() -> None:
    composed = compose(["run.dir=a", "run.resume=auto", "run.max_time=1h", "run.name=b"])
    freeze(composed, Path("config.yaml"))
    run = load(Path("config.yaml")).tree["run"]
    assert run == {
        "name": "b",
        "root": "runs",
        "dir": None,
        "resume": "never",
        "max_time": "1h",
        "hang_timeout": "auto",
    }


@pytest.mark.parametrize("length", ["epochs=3", "steps=20"])
def test_a_frozen_config_has_one_length(length: str) -> None:
    Path("mine.yaml").write_text("steps: 7\n")
    key, value = length.split("=")
    freeze(compose(["recipe=./mine.yaml", length]), Path("config.yaml"))
    tree = load(Path("config.yaml")).tree
    assert {name: tree[name] for name in ("epochs", "steps") if tree[name] is not None} == {key: int(value)}


def test_keys_of_a_frozen_config_have_lines() -> None:
    freeze(compose(), Path("config.yaml"))
    lines = Path("config.yaml").read_text().splitlines()
    number = lines.index("batch_size: 64") + 1
    loaded = load(Path("config.yaml"), ["seed=7"])
    assert loaded.place("batch_size") == f"config.yaml:{number}"
    assert loaded.place("seed") == "command line"


def test_arguments_go_over_a_frozen_config() -> None:
    freeze(compose(["optimizer.lr=0.5", "seed=3"]), Path("config.yaml"))
    tree = load(Path("config.yaml"), ["optimizer.lr=0.25", "data=cifar10", "data.root=/x", "+new.key=1"]).tree
    assert tree["optimizer"]["lr"] == 0.25
    assert tree["seed"] == 3
    assert tree["data"]["root"] == "/x"
    assert tree["data"]["name"] == "cifar10"
    assert tree["new"] == {"key": 1}
    replaced = load(Path("config.yaml"), ["optimizer=sgd"]).tree["optimizer"]
    assert replaced == compose(["optimizer=sgd"]).tree["optimizer"]
    with pytest.raises(ConfigError) as caught:
        load(Path("config.yaml"), ["recipe=resnet_cifar"])
    assert caught.value.code == "C011"


def test_values_from_the_environment_stay_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "/secret-place")
    composed = compose(
        [
            "run.root=${oc.env:SOMEWHERE}/runs",
            "run.name=${run.root}/x",
            "stop.metric=${oc.env:UNSET_ONE,here}",
            "task=${run.resume}",
        ]
    )
    assert composed.tree["run"]["name"] == "/secret-place/runs/x"
    freeze(composed, Path("config.yaml"))
    text = Path("config.yaml").read_text()
    assert "secret-place" not in text
    written = yaml.safe_load(text)
    assert written["run"]["root"] == "${oc.env:SOMEWHERE}/runs"
    assert written["run"]["name"] == "${oc.env:SOMEWHERE}/runs/x"
    assert written["stop"]["metric"] == "${oc.env:UNSET_ONE,here}"
    assert written["task"] == {"name": "never"}
    assert load(Path("config.yaml")).tree == composed.tree
    monkeypatch.setenv("SOMEWHERE", "/elsewhere")
    assert load(Path("config.yaml")).tree["run"]["name"] == "/elsewhere/runs/x"
    monkeypatch.delenv("SOMEWHERE")
    with pytest.raises(
        ConfigError, match=r"config\.yaml:\d+\): the environment variable SOMEWHERE is not set"
    ):
        load(Path("config.yaml"))


def test_what_cfg_prints_reads_back_as_what_was_given() -> None:
    words = [
        "optimizer.lr=${batch_size}",
        r"device='a\${b}'",
        "run.root=${oc.env:UNSET_ONE}/runs",
        "run.name=${nowhere}",
        "data=imagefolder",
        "logger=wandb",
        "logger.api_key=hush",
        "steps=5",
    ]
    text = show_config("job", words)
    assert "hush" not in text
    Path("config.yaml").write_text(text)
    given = compose(words, complete=False).tree
    again = load(Path("config.yaml"), ["logger.api_key=hush"], complete=False)
    assert again.tree == given | {"epochs": None}
    assert show_config("job", [], Path("config.yaml")) == text
    ok = show_config("job", ["optimizer.lr=${batch_size}", r"device='a\${b}'"])
    Path("config.yaml").write_text(ok)
    tree = load(Path("config.yaml")).tree
    assert (tree["optimizer"]["lr"], tree["device"]) == (64, "a${b}")


def test_secrets_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hush1")
    composed = compose(
        [
            "logger=wandb",
            "logger.api_key=hush2",
            "logger.token=${oc.env:MY_KEY}",
            "logger.login={password: hush3}",
            "logger.secret=[hush4]",
            "model.tokenizer=words",
            "data.batch_tokens=4096",
            "logger.key=null",
            "data.shards=[https://me:hush5@host/a.tar]",
            "data.val_shards=https://me:${oc.env:MY_KEY}@host/b.tar",
        ]
    )
    warnings = freeze(composed, Path("config.yaml"))
    text = Path("config.yaml").read_text()
    assert "hush" not in text
    written = yaml.safe_load(text)
    assert written["logger"]["api_key"] == written["logger"]["login"]["password"] == "<secret>"
    assert written["logger"]["token"] == "${oc.env:MY_KEY}"
    assert written["logger"]["key"] is None
    assert written["model"]["tokenizer"] == "words"
    assert written["data"]["batch_tokens"] == 4096
    assert written["data"]["val_shards"] == "https://me:${oc.env:MY_KEY}@host/b.tar"
    hidden = {"logger.api_key", "logger.login.password", "logger.secret", "data.shards.0"}
    assert {w.split(" ")[0] for w in warnings} == hidden
    assert not any("hush" in w for w in warnings)
    assert composed.tree["logger"]["api_key"] == "hush2"


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apiKey",
        "API-Key",
        "logger.secret",
        "TOKEN",
        "passwd",
        "cookie",
        "data.secretKey",
        "headers",
    ],
)
def test_secret_names(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer", "batch_tokens", "monkey", "keyboard", "secretary", "key.value", "author"),
        *("num_key_value_heads", "model.pad_token_id", "max_token_length", "key_dim"),
        *("data.text_key", "data.label_key", "model.cls_token", "model.mask_token", "cookie_jar"),
    ],
)
def test_harmless_names(key: str) -> None:
    assert not is_secret(key)


def test_no_key_of_ours_is_taken_for_a_secret() -> None:
    keys = [*flatten(defaults())]
    files = (file for group in paths.groups() for file in paths.options(group).values())
    targets = {str(yaml.safe_load(file.read_text() or "{}") or {}) for file in files}
    for path in {found for text in targets for found in re.findall(r"'_target_': '(ptfast\.[\w.]+)'", text)}:
        keys += inspect.signature(locate(path)).parameters
    assert len(keys) > 200
    assert [key for key in keys if is_secret(key)] == []


@pytest.mark.parametrize(
    ("key", "meant", "shown"),
    [
        ("eval.batch_sze", "eval.batch_size", "eval.batch_sze=x"),
        ("logger.tokne", "logger.token", "logger.tokne=<secret>"),
        ("logger.api_kye", "", "logger.api_kye=<secret>"),
    ],
)
def test_the_value_of_a_misspelt_key_is_hidden_where_a_secret_may_be_meant(
    key: str, meant: str, shown: str
) -> None:
    hint = f"Did you mean {meant}?" if meant else None
    assert str(ConfigError("C002", "unknown key", key=key, value="x", suggestion=hint)).startswith(shown)


def test_command_lines_are_redacted() -> None:
    assert redact(
        [
            "ptfast",
            "train",
            "logger.api_key=hush",
            "++logger={api_key: hush, project: x, login: {password: 'hush, hush'}}",
            "a.token=${oc.env:X}",
            "--api-token",
            "hush",
            "--secret=hush",
            "data.tokenizer=words",
            "data.shards=https://me:hush@host/{000..009}.tar?X-Signature=hush&v=2",
            "data.shards=https://me:${oc.env:X}@host/a.tar",
        ]
    ) == [
        "ptfast",
        "train",
        "logger.api_key=<secret>",
        "++logger={api_key: <secret>, project: x, login: {password: <secret>}}",
        "a.token=${oc.env:X}",
        "--api-token",
        "<secret>",
        "--secret=<secret>",
        "data.tokenizer=words",
        "data.shards=https://<secret>@host/{000..009}.tar?X-Signature=<secret>&v=2",
        "data.shards=https://me:${oc.env:X}@host/a.tar",
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [("a: [1\n", "config.yaml:1:4"), ("a: 1\na: 2\n", "config.yaml:2:1"), ("", "config.yaml")],
)
def test_a_damaged_file_is_named_by_line(text: str, place: str) -> None:
    Path("config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(Path("config.yaml"))
    assert (caught.value.code, caught.value.place) == ("C007", place)


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load(Path("nowhere.yaml"))


def test_a_key_that_a_run_was_written_without_has_its_default() -> None:
    """Or runs from before the key could not be resumed."""
    tree = compose().tree
    old = {**tree, "optimizer": {k: v for k, v in tree["optimizer"].items() if k != "lr_scaling"}}
    del old["rewrites"]
    assert changed_keys(old, compose(["rewrites.bias_before_norm=true"]).tree) == []
    assert changed_keys(old, compose(["rewrites.channels_last=false"]).tree) == [
        "rewrites.bias_before_norm",
        "rewrites.channels_last",
    ]
