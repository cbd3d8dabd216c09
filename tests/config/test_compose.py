"""Composing: arguments, presets, recipes, own folders, strict YAML, interpolations."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import yaml

from ptfast.config.compose import compose
from ptfast.config.editors import help as config_help
from ptfast.config.files import paths
from ptfast.config.read import read_config
from ptfast.config.schema import Config, defaults, section_of
from ptfast.core.errors import ConfigError, error_line


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in a folder of its own, without ./conf and ./recipes unless it makes them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: str, text: str) -> str:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return file


def refusal(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(arguments)
    assert "\n" not in str(caught.value)
    return caught.value


NESTED_ANCHORS = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7)
)
OPTIONS = {group: list(paths.options(group)) for group in paths.groups() if group != paths.PRESETS}


@pytest.mark.parametrize("number", range(max(map(len, OPTIONS.values()))))
def test_every_option_composes_and_says_what_it_is(number: int) -> None:
    """One of every group at a time."""
    chosen = {group: options[number] for group, options in OPTIONS.items() if number < len(options)}
    composed = compose([f"{group}={option}" for group, option in chosen.items()], complete=False)
    for group, option in chosen.items():
        written = yaml.safe_load(paths.options(group)[option].read_text()) or {}
        written.pop("defaults", None)
        assert written.items() <= composed.tree[group].items()
        entry = next(e for e in config_help.entries(group) if e.name == option)
        assert 10 < len(entry.summary) < 110
        assert "\n" not in entry.summary


@pytest.mark.parametrize("name", ["char_gpt", "resnet_cifar", "resnet_digits", "text_sst2"])
def test_every_recipe_composes_and_names_its_command(name: str) -> None:
    composed = compose([f"recipe={name}"], complete=False)
    assert composed.tree["recipe"] == name
    entry = next(e for e in config_help.entries(paths.RECIPES) if e.name == name)
    assert entry.command.startswith(f"ptfast train recipe={name}")
    assert compose([f"+recipe={name}"], complete=False).tree == composed.tree


def test_the_default_preset_is_what_the_primary_config_says() -> None:
    assert compose(["preset=safe"]).tree == compose().tree


def test_precedence_is_argument_then_preset_then_recipe_then_default() -> None:
    write("recipes/mine.yaml", "defaults:\n  - precision: bf16\nepochs: 3\nbatch_size: 8\n")
    assert compose().tree["precision"]["mode"] == "fp32"
    assert compose(["recipe=mine"]).tree["precision"]["mode"] == "bf16"
    assert compose(["recipe=mine", "preset=fast"]).tree["precision"]["mode"] == "amp"
    assert compose(["preset=fast", "recipe=mine", "precision=fp32"]).tree["precision"]["mode"] == "fp32"
    assert compose(["recipe=mine", "epochs=5"]).tree["epochs"] == 5
    assert compose(["recipe=mine", "preset=plain"]).tree["epochs"] == 3


def test_a_preset_that_a_recipe_names_goes_under_the_recipe() -> None:
    write("recipes/mine.yaml", "defaults:\n  - override /dataloader: workers\npreset: plain\n")
    tree = compose(["recipe=mine"]).tree
    assert tree["dataloader"]["kind"] == "workers"
    assert tree["optimizer"]["fused"] is False
    assert tree["rewrites"]["channels_last"] is False
    assert compose(["recipe=mine", "preset=safe"]).tree["optimizer"]["fused"] == "auto"


def test_a_preset_leaves_alone_what_an_option_does_not_have() -> None:
    write("conf/optimizer/mine.yaml", "_target_: my.Optimizer\nlr: 0.1\n")
    assert compose(["optimizer=mine", "preset=plain"]).tree["optimizer"] == {
        **defaults()["optimizer"],
        "_target_": "my.Optimizer",
        "lr": 0.1,
    }
    own = compose(["optimizer=mine", "preset=plain", "optimizer.fused=true"]).tree["optimizer"]
    assert own["fused"] is True


def test_a_preset_sets_keys_of_an_option_that_it_names_before_them() -> None:
    plain = compose(["preset=plain"])
    assert plain.tree["dataloader"]["pin"] is False
    assert plain.place("dataloader.pin") == _line("conf/preset/plain.yaml", "dataloader.pin")
    assert compose(["preset=plain", "dataloader.pin=true"]).tree["dataloader"]["pin"] is True


def test_a_section_alone_holds_its_defaults() -> None:
    """Option files set what they are about, and one of each group names every key of its section."""
    tree = compose().tree
    for group in set(paths.groups()) - {paths.PRESETS}:
        part = section_of(Config.model_fields[group].annotation)
        assert part is not None
        texts = [file.read_text() for file in paths.options(group).values()]
        for key, value in defaults()[group].items():
            assert key in tree[group]
            named = any(re.search(rf"\b{key}\b", text) for text in texts) or group == "optimizer"
            assert named, f"no option of {group} names {key}"
            bases = [text for text in texts if "defaults:" not in text]
            repeated = [text for text in bases if f"\n{key}: {yaml.safe_dump(value).split()[0]}\n" in text]
            assert value is None or not repeated, repeated


def test_numbers_of_one_optimizer_do_not_leak_into_another() -> None:
    assert "nesterov" not in compose(["recipe=resnet_cifar", "optimizer=adamw"]).tree["optimizer"]


def test_unknown_keys_stay_in_the_tree_for_validation_to_reject() -> None:
    tree = compose(["+recpie=resnet_cifar", "+optimizer.lrr=1", "++model.foo=2", "optimzer.lr=3"]).tree
    assert tree["recpie"] == "resnet_cifar"
    assert tree["optimizer"]["lrr"] == 1
    assert tree["model"]["foo"] == 2
    assert tree["optimzer"] == {"lr": 3}


def test_each_key_has_a_place() -> None:
    composed = compose(["recipe=resnet_cifar", "optimizer.lr=0.2", "seed=1", "preset=plain"])
    assert composed.place("optimizer.lr") == composed.place("seed") == "command line"
    assert composed.place("optimizer.nesterov") == _line("conf/optimizer/sgd_cifar.yaml", "nesterov")
    assert composed.place("optimizer.momentum") == _line("conf/optimizer/sgd.yaml", "momentum")
    assert composed.place("epochs") == _line("recipes/resnet_cifar.yaml", "epochs")
    assert composed.place("steps") == _line("conf/config.yaml", "steps")
    assert composed.place("run.root") == composed.place("gradients.clip_norm") == "default"
    assert composed.place("optimizer.fused") == _line("conf/preset/plain.yaml", "optimizer.fused")
    assert composed.place("optimizer.lr.deeper") == "command line"
    assert composed.place("model.unheard") == "conf/model/resnet20.yaml"


def _line(file: str, start: str) -> str:
    lines = (paths.builtin_root().conf.parent / file).read_text().splitlines()
    return f"{file}:{1 + next(i for i, line in enumerate(lines) if line.startswith(start))}"


def test_an_error_keeps_what_was_found_with_it_where_it_is_placed_or_sent() -> None:
    error = ConfigError("C005", "must be at least 1", key="epochs", value=0)
    error.others = (ConfigError("C002", "unknown key", key="optimizer.lrr"),)
    lines = error_line(error).splitlines()[1:]
    composed = compose(["epochs=0"])
    for same in (
        composed.placed(error),
        error.changed(suggestion="Set it"),
        pickle.loads(pickle.dumps(error)),
    ):
        assert error_line(same).splitlines()[1:] == lines


def test_own_options_and_recipes_come_first() -> None:
    write("conf/optimizer/sgd.yaml", "# Mine\n_target_: my.Sgd\nlr: 7\n")
    write("conf/optimizer/tuned.yaml", "# Tuned\ndefaults:\n  - adamw\n  - _self_\nlr: 0.5\n")
    write("conf/config.yaml", "of: another program\n")
    write("recipes/resnet_digits.yaml", "epochs: 99\n")
    own = {**defaults()["optimizer"], "_target_": "my.Sgd", "lr": 7}
    assert compose(["optimizer=sgd"]).tree["optimizer"] == own
    assert compose(["optimizer=tuned"]).tree["optimizer"]["betas"] == [0.9, 0.999]
    composed = compose(["recipe=resnet_digits"])
    assert composed.tree["epochs"] == 99
    assert composed.place("epochs") == "recipes/resnet_digits.yaml:1"
    assert "of" not in composed.tree


@pytest.mark.parametrize("folder", ["", "with space/", "with space/é/", "a@b/"])
def test_a_recipe_by_path_needs_no_header(folder: str) -> None:
    file = write(
        f"{folder}mine.yaml", "defaults:\n  - override /data: cifar10\n  - model: resnet20\nepochs: 2\n"
    )
    for given in (f"./{file}", str(Path(file).absolute())):
        composed = compose([f"recipe={given}"])
        assert composed.tree["recipe"] == "mine"
        assert composed.tree["epochs"] == 2
        assert composed.tree["data"]["name"] == "cifar10"
        assert composed.place("epochs") == f"{file}:4"


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ("optimizer.lr:0.1", "C001", ["optimizer.lr:0.1 (command line)", "Write optimizer.lr=0.1"]),
        ("optimizer.lr", "C001", ["Write optimizer.lr=VALUE"]),
        ("resnet_digits", "C001", ["Write recipe=resnet_digits"]),
        ("optimizer.lr='a", "C001", ["quotes"]),
        ("model.hidden=[1,2", "C001", ["brackets"]),
        ("=3", "C001", ["no key"]),
        ("optimizer@mine=sgd", "C001", ["@"]),
        (
            "precision=ampp",
            "C003",
            [
                "precision=ampp (command line)",
                "Did you mean precision=amp?",
                "bf16, bf16_true, default, fp32",
            ],
        ),
        ("precision=", "C003", ["Options of precision"]),
        ("logger=null", "C003", ["Did you mean logger=none?"]),
        ("checkpointing=last", "C003", ["Did you mean saving=last?", "activation checkpointing"]),
        ("model=adamw", "C003", ["Did you mean optimizer=adamw?"]),
        ("preset=fsat", "C003", ["Did you mean preset=fast?"]),
        ("recipe=resnet_cfar", "C003", ["Did you mean resnet_cifar?", "Recipes: char_gpt, cifar_speed"]),
        ("recipe=./mine.yaml", "C003", ["no such recipe file"]),
        ("optimizer.lr=0.1 optimizer.lr=0.2", "C006", ["given twice, with 0.1 and 0.2"]),
        ("optimizer.lr=0.1 +optimizer.lr=0.2", "C006", ["given twice"]),
        ("optimizer=sgd optimizer=adam", "C006", ["sgd and adam"]),
        ("optimizer.lr=0.1,0.2", "C014", ["Add -m to sweep", "[0.1,0.2]"]),
        ("optimizer=sgd,adam", "C014", ["-m"]),
        ("~foo.bar", "C002", ["nothing to delete"]),
        ("run.name=${oc.env:NO_SUCH_VARIABLE}", "C008", ["NO_SUCH_VARIABLE", "not set"]),
        ("run.name=${oc.evn:HOME}", "C008", ["Did you mean oc.env?"]),
        ("run.name=${run.name}", "C008", ["refers to itself"]),
        ("run.name=${run.root} run.root=${run.name}", "C008", ["refers to itself"]),
        ("run.name=${nowhere.at.all}", "C008", ["no key nowhere"]),
        ("data=imagefolder run.name=${data.root}", "C016", ["data.root (conf/data/imagefolder.yaml:"]),
    ],
)
def test_bad_arguments(arguments: str, code: str, parts: list[str]) -> None:
    error = refusal(*arguments.split(" "))
    assert error.code == code
    for part in parts:
        assert part in str(error)


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert compose(["optimizer.lr=0.1", "++optimizer.lr=0.1"]).tree["optimizer"]["lr"] == 0.1


@pytest.mark.parametrize(
    "value", ["/tmp/é(1)/x", "a b", "x\ny", "\x1b[31mred", "../../x", "x" * 300, "50%", "~/x"]
)
def test_texts_outside_the_grammar_arrive_as_typed(value: str) -> None:
    assert compose([f"run.name={value}"]).tree["run"]["name"] == value


def test_sections_merge_and_interpolations_resolve() -> None:
    composed = compose(["optimizer={lr: 0.5}", "run.name=${run.root}-${seed}", "seed=3"])
    assert composed.tree["optimizer"]["lr"] == 0.5
    assert composed.tree["optimizer"]["betas"] == [0.9, 0.999]
    assert composed.tree["run"]["name"] == "runs-3"
    assert composed.tree_unresolved["run"]["name"] == "${run.root}-${seed}"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("epochs: 3\n\tseed: 1\n", "mine.yaml:2:1", "`\\tseed: 1`"),
        ("epochs: 3\nmodel:\n  hidden: [1, 2\nseed: 1\n", "mine.yaml:3:11", "`  hidden: [1, 2`"),
        ("epochs: 3\nepochs: 4\n", "mine.yaml:2:1", "`epochs` is given twice"),
        ("optimizer:\n  lr: 1\n  lr: 2\n", "mine.yaml:3:3", "`lr` is given twice"),
        ("", "mine.yaml", "empty"),
        ("# only a comment\n", "mine.yaml", "empty"),
        ("- a\n- b\n", "mine.yaml:1:1", "key: value"),
        ("no: 3\n", "mine.yaml:1:1", "quote it"),
        ("a: !!python/object:os.system {}\n", "mine.yaml:1:4", "could not determine a constructor"),
        ("a: &x [*x]\n", "mine.yaml", "in itself"),
        (NESTED_ANCHORS, "mine.yaml", "anchors that multiply"),
        ("defaults:\n  - data: cifar11\n", "recipes/mine.yaml:2", "Did you mean data=cifar10?"),
        ("defaults:\n  - optimzer: sgd\n", "recipes/mine.yaml:2", "Did you mean optimizer?"),
        ("defaults:\n  - resnet_cfar\n", "recipes/mine.yaml:2", "Did you mean resnet_cifar?"),
        ("defaults:\n  - _self_\n  - ./no.yaml\n", "recipes/mine.yaml:3", "no such recipe file"),
        # Fault and line are where an editor shows them, and where the reason is.
        ("epochs:\xa03\nseed: 1\n", "mine.yaml:1:8", "U+00A0 (no-break space) for a space: `epochs:"),
        ("seed: 1\nepochs:\xa03\n", "mine.yaml:2:8", "U+00A0 (no-break space)"),
        ("a: {b:\xa01, c: 2\nd: 3\n", "mine.yaml:1:7", "U+00A0"),
        ("a: x\u2028y\nb: 1\n", "mine.yaml:1:5", "U+2028 (line separator)"),
        ("# a\x85b\nc: 1\n", "mine.yaml:1:4", "U+0085 (next line)"),
        ('a: "x\u2028y\x85z\u2029"\nb: 1\nb: 2\n', "mine.yaml:3:1", "given twice: `b: 2`"),
        ('a: "x:\xa0y"\nb: [1\nc: 2\n', "mine.yaml:2:4", "not closed, or a missing comma: `b: [1`"),
        ("seed: 1\nepochs 3\nbatch_size: 8\n", "mine.yaml:2:1", "`epochs 3`"),
        ("\ufeffa: 1\na: 2\n", "mine.yaml:2:1", "given twice: `a: 2`"),
    ],
)
def test_bad_yaml_is_named_by_line(text: str, place: str, what: str) -> None:
    write("recipes/mine.yaml", text)
    error = refusal("recipe=mine")
    assert error.code in ("C007", "C003")
    assert error.place is not None
    assert error.place.endswith(place)
    assert what in str(error)


def test_places_count_lines_as_editors_do() -> None:
    write("mine.yaml", 'run:\n  name: "x\u2028y\x85z"\nseed: 3\n')
    composed = compose(["recipe=./mine.yaml"])
    assert composed.place("seed") == "mine.yaml:3"


def test_a_file_that_is_no_text() -> None:
    Path("mine.yaml").write_bytes(b"epochs: \xff\xfe\n")
    assert "UTF-8" in str(refusal("recipe=./mine.yaml"))


def test_yaml_surprises_are_warned_of() -> None:
    lines = {
        "time: 12:30:00": "the number 45000",
        "task: no": "YAML reads no as false",
        "a: 0o10": "Write 8",
        "b: 010": "octal number 8",
        "c: 'no'": None,
        "d: 1e-3": None,
        "e: true": None,
        "f: 2020-01-01": None,
    }
    write("mine.yaml", "\n".join(lines) + "\n")
    composed = compose(["recipe=./mine.yaml"])
    expected = [(number, what) for number, what in enumerate(lines.values(), 1) if what]
    assert len(composed.warnings) == len(expected)
    for warning, (number, what) in zip(composed.warnings, expected, strict=True):
        assert f"(mine.yaml:{number})" in warning
        assert what in warning
    assert composed.tree["d"] == 1e-3
    assert composed.tree["f"] == "2020-01-01"


def test_several_loggers_each_have_a_section(in_tmp: Path) -> None:
    Path("conf/logger").mkdir(parents=True)
    Path("conf/logger/mine.yaml").write_text("defaults:\n  - wandb\n  - _self_\n\nproject: ours\n")
    Path("mine.yaml").write_text(
        "defaults:\n  - override /logger: [csv, mine]\n\nlogger:\n  mine:\n    tags: [a]\n"
    )
    for words in (["recipe=./mine.yaml"], ["logger=[csv,mine]", "logger.mine.tags=[a]"]):
        composed, config = read_config([*words, "logger.csv.path=x.csv"])
        targets = config.logger.targets
        assert {key: target.path.rpartition(".")[2] for key, target in targets.items()} == {
            "logger.csv": "Csv",
            "logger.mine": "Wandb",
        }
        assert targets["logger.csv"].kwargs == {"path": "x.csv"}
        assert targets["logger.mine"].kwargs == {"project": "ours", "tags": ["a"]}
    assert composed.place("logger.mine.project") == "conf/logger/mine.yaml:5"
    assert read_config(["logger=mine"])[1].logger.targets.keys() == {"logger"}
    assert read_config(["logger=[csv,none]"])[1].logger.targets.keys() == {"logger.csv"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["logger=[csv,tensorbord]"], "C003", "Did you mean logger=tensorboard?"),
        (["logger=[csv,none]", "logger.csv.pth=x"], "C002", "logger.csv.pth=x (command line): unknown key"),
        (["model=[mlp,gpt]"], "C003", "no such option of model"),
        (["logger=[]"], "C003", "no such option of logger"),
    ],
)
def test_several_loggers_are_checked_one_by_one(words: list[str], code: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(words)
    assert caught.value.code == code
    assert said in str(caught.value)
