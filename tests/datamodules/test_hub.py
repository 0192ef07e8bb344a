"""The hub without a network: what is asked, what a dead network costs, what is cached."""

import logging
import time

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetInfo, Features, SplitInfo, Value
from datasets.arrow_writer import ArrowWriter
from datasets.splits import SplitDict
from huggingface_hub import constants

from gtpo_lightning.datamodules import AIME2025, GSM8K
from gtpo_lightning.datamodules import hub as hub_module
from gtpo_lightning.datamodules.hub import HubSource

ROWS = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(3)]


def test_names_and_rows_are_asked_for_as_the_library_takes_it(hub):
    hub.sets["some/set"] = {"main": {"train": ROWS, "test": ROWS[:1]}, "more": {"all": ROWS}}
    source = HubSource("some/set")
    for _ in range(2):
        assert source.configs() == ["main", "more"]
        assert source.splits("main") == ["train", "test"]
    assert source.rows("main", "test") == ROWS[:1]
    assert hub.asked == [("some/set", "configs"), ("some/set", "main", "splits"), ("some/set", "main", "test")]


def test_the_only_configuration_needs_no_name(hub):
    hub.sets["some/set"] = {"default": {"train": ROWS}}
    assert HubSource("some/set").splits("") == ["train"]
    assert HubSource("some/set").rows("", "train") == ROWS


def test_classes_are_read_by_their_names(hub):
    features = Features({"level": ClassLabel(names=["Level 1", "Level 2"]), "problem": Value("string")})
    table = Dataset.from_dict({"level": [1, 0, None], "problem": list("abc")}, features=features)
    hub.sets["some/set"] = {"default": {"train": table}}
    assert [row["level"] for row in HubSource("some/set").rows("", "train")] == ["Level 2", "Level 1", None]


def test_errors_of_the_hub_are_explained(hub):
    hub.sets["some/set"] = {"main": {"train": ROWS}}
    with pytest.raises(ValueError, match=r"source: could not list the configurations of 'no/set' .*NotFound"):
        HubSource("no/set").configs()
    with pytest.raises(ValueError, match=r"could not load split 'dev' of config 'main' of 'some/set' .*\['train'\]"):
        HubSource("some/set").rows("main", "dev")
    with pytest.raises(ValueError, match=r"could not list the splits of config 'x' of 'some/set' .*valid: a hub id"):
        HubSource("some/set").splits("x")


# without a network


@pytest.fixture
def dead_hub(monkeypatch, tmp_path):
    """The real libraries, online, with a hub that nobody answers for and an empty cache."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub_module._unreachable.cache_clear()
    yield tmp_path / "cache"
    hub_module._unreachable.cache_clear()


def test_an_unreachable_hub_is_told_at_once_and_leaves_the_libraries_online(dead_hub):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"could not load split 'train' of config 'main' of 'openai/gsm8k' .*the hub "
                       r"cannot be reached, ConnectError.*valid: a hub id, or a local"):  # fmt: skip
        GSM8K().setup("fit")
    for call in (HubSource("no/set").configs, lambda: HubSource("no/set").splits("main")):
        with pytest.raises(ValueError, match=r"could not list .* of 'no/set' .*the hub cannot be reached"):
            call()
    assert time.monotonic() - start < 5
    assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (False, False)


def test_a_hub_that_answers_is_not_taken_for_dead(dead_hub, monkeypatch, hub):
    """Any answer counts; the library is then called online."""

    class Session:
        def head(self, url, timeout):
            assert timeout <= 10
            return "404"

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    hub.sets["some/set"] = {"main": {"train": ROWS}}
    seen = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: seen.append(datasets.config.HF_HUB_OFFLINE) or 1 / 0)
    with pytest.raises(ValueError, match=r"from the hub \(ZeroDivisionError: division by zero\)"):
        HubSource("some/set").rows("main", "train")
    assert seen == [False]


def put_in_cache(cache, location, config, splits):
    """As `datasets` leaves a data set that was loaded once."""
    owner, name = location.split("/")
    folder = cache / f"{owner}___{name.lower()}" / config / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    infos = []
    for split, rows in splits.items():
        writer = ArrowWriter(path=str(folder / f"{name.lower()}-{split}.arrow"))
        for row in rows:
            writer.write(row)
        count, size = writer.finalize()
        infos.append(SplitInfo(name=split, num_bytes=size, num_examples=count, dataset_name=name.lower()))
    info = DatasetInfo(
        features=Dataset.from_list(rows).features,
        config_name=config,
        dataset_name=name.lower(),
        builder_name="parquet",
        version="0.0.0",
        splits=SplitDict.from_split_dict(infos, dataset_name=name.lower()),
    )
    info.write_to_directory(str(folder))


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_cached_is_read_without_a_network(dead_hub, monkeypatch, offline):
    logging.getLogger("datasets").setLevel(logging.ERROR)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    put_in_cache(dead_hub, "openai/gsm8k", "main", {"train": ROWS, "test": ROWS[:1]})
    # Names in lower case: the library's own rule for capitals is not copied here.
    for part in ("I", "II"):
        rows = [{"question": f"AIME {part} {i}", "answer": str(i)} for i in range(2)]
        put_in_cache(dead_hub, "my/aime2025", f"AIME2025-{part}", {"test": rows})
    start = time.monotonic()
    data = GSM8K(val_size=1)
    data.prepare_data()
    data.setup()
    assert [len(part) for part in (data.train_problems, data.val_problems, data.test_problems)] == [2, 1, 1]
    mirror = AIME2025(source="my/aime2025")
    mirror.setup("test")
    assert [one.question for one in mirror.test_problems] == ["AIME I 0", "AIME I 1", "AIME II 0", "AIME II 1"]
    with pytest.raises(ValueError, match=r"(?s)could not load split 'train' of config 'socratic' .*'main'"):
        GSM8K(config="socratic").setup("fit")
    assert time.monotonic() - start < 5
