"""Settings of each family, of which the model's config.json decides."""

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from pydantic import Field

from paddle_vl.config import families as registered
from paddle_vl.config.families import FamilyEntry, family_of_run, register_family
from paddle_vl.config.family_settings import settings_help
from paddle_vl.config.load import flatten, load_run_config, save_run_config
from paddle_vl.config.schema import DataConfig, RunConfig
from paddle_vl.config.section import Section
from paddle_vl.families.pi07.settings import PI07Run
from paddle_vl.families.vlm.settings import VLRun

POLICY = {"type": "pi07_low_level"}
QWEN = {"model_type": "qwen3_vl"}
RUN = {
    "data": {"train": ["a.jsonl"], "processor": "p"},
    "train": {"output_dir": "out", "max_steps": 4},
}


@pytest.fixture
def write(tmp_path):
    def _write(model: object, **sections: object) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({**RUN, "model": model, **sections}), encoding="utf-8")
        return file

    return _write


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(POLICY))
    return tmp_path / "model"


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        load_run_config(file, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (POLICY, PI07Run),
        ({"type": "pi07_high_level"}, PI07Run),
        (QWEN, VLRun),
        ({"text_config": {}}, VLRun),
        ({"type": ["pi07_low_level"]}, VLRun),
        ("qwen3-vl-2b", VLRun),
    ],
)
def test_model_config_decides(write, config, expected):
    assert type(load_run_config(write({"config": config}))) is expected


def test_files_decide(write, folder):
    assert type(load_run_config(write({"pretrained": str(folder)}))) is PI07Run
    assert type(load_run_config(write({"config": str(folder / "config.json")}))) is PI07Run
    resumed = [f"train.resume_from_checkpoint={folder}"]
    assert type(load_run_config(write({"pretrained": "gone"}), resumed)) is PI07Run


@pytest.mark.parametrize("model", [{"pretrained": "gone"}, {"config": "gone.json"}])
def test_settings_decide_where_the_model_cannot_be_read(write, model):
    """The unreadable model is a separate error when the run starts."""
    assert type(load_run_config(write(model))) is VLRun
    assert type(load_run_config(write(model), ["data.statistics=s.json"])) is PI07Run
    assert type(load_run_config(write(model), ["data.max_length=64"])) is VLRun


def test_a_model_that_does_not_fit_the_settings_is_refused_with_its_file(write, folder):
    file, model = write({"pretrained": str(folder)}, data={**RUN["data"], "fields": []}), folder
    config = load_run_config(file)
    assert family_of_run(config).name == "pi07 policy"
    (model / "config.json").write_text(json.dumps(QWEN))
    with pytest.raises(ValueError, match=r"family Qwen3-VL, but the settings are those of pi07"):
        family_of_run(config)
    (model / "config.json").write_text("{not json")
    with pytest.raises(RuntimeError, match=r"model/config\.json is not valid JSON"):
        family_of_run(config)


def test_settings_of_another_family_are_refused_together_with_place_and_remedy(write):
    file = write({"config": POLICY}, data=RUN["data"] | {"columns": {"ask": "query"}})
    line = file.read_text().splitlines().index("  columns:") + 1
    message = refusal(file, "parallel.ep_degree=2", "data.max_length=64", "train.sed=1")
    assert message.startswith("4 problems in the configuration:")
    # Other tests may have registered a family with the same settings.
    remedy = r"applies only to Qwen3-VL[\w., -]*, and the model is a pi07: remove it"
    assert re.search(rf"{re.escape(str(file))}:{line}: data\.columns {remedy}", message)
    assert re.search(rf"command line: parallel\.ep_degree {remedy}", message)
    assert re.search(rf"command line: data\.max_length {remedy}", message)
    assert "train.sed is not a setting; did you mean train.seed?" in message
    message = refusal(write({"config": QWEN}), "data.drops.subgoal_drop_prob=0.5")
    assert "data.drops applies only to pi07, and the model is a Qwen3-VL: remove it" in message


@pytest.mark.parametrize("setting", ["data.packing=0", "data.max_length=2049"])
def test_only_the_default_of_another_family_s_setting_is_accepted(write, setting):
    assert "applies only to Qwen3-VL" in refusal(write({"config": POLICY}), setting)


@pytest.mark.parametrize(("model", "run"), [(POLICY, PI07Run), (QWEN, VLRun)])
def test_a_configuration_with_the_settings_of_all_families_at_their_defaults_loads(
    write, tmp_path, model, run
):
    file = write({"config": model})
    config = load_run_config(file)
    values: dict = {}
    for one in (PI07Run, VLRun):
        everything = one.model_validate({**RUN, "model": {"config": model}}).model_dump()
        for section, settings in everything.items():
            values.setdefault(section, {}).update(settings)
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert load_run_config(file) == config
    assert isinstance(config, run)
    save_run_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config
    saved = flatten(yaml.safe_load((tmp_path / "config.yaml").read_text()))
    assert saved == flatten(config.model_dump())


class CaptionData(DataConfig):
    max_length: int = Field(default=77, ge=1, description="longest caption, in tokens")


class CaptionStyle(Section):
    tone: str = Field(default="plain", description="tone of the captions")


class CaptionRun(RunConfig):
    """A family that shares the name of a Qwen3-VL setting and has its own section and rule."""

    family: ClassVar[str] = "captioner"
    needs_processor: ClassVar[bool] = False

    data: CaptionData
    style: CaptionStyle = Field(default_factory=CaptionStyle)

    def problems(self):
        if self.style.tone == "rude":
            yield "style.tone is rude: choose another tone"


@pytest.fixture
def _captioner(monkeypatch):
    monkeypatch.setattr(registered, "_FAMILIES", list(registered._FAMILIES))
    register_family(FamilyEntry("captioner", ("caption",), f"{__name__}:CaptionRun", "none:None"))


@pytest.mark.usefixtures("_captioner")
def test_a_registered_family_has_its_own_settings(write):
    file = write({"config": {"model_type": "caption"}}, data={"train": ["a.jsonl"]})
    config = load_run_config(file, ["style.tone=kind"])
    assert type(config) is CaptionRun
    assert (config.data.max_length, config.style.tone) == (77, "kind")
    assert "choose another tone" in refusal(file, "style.tone=rude")
    message = refusal(file, "data.packing=true", "style.tine=kind", "data.max_length=0")
    assert re.search("data.packing applies only to Qwen3-VL.*, and the model is a capt", message)
    assert "style.tine is not a setting; did you mean style.tone?" in message
    assert "data.max_length is 0; it must be at least 1" in message
    message = refusal(write({"config": POLICY}), "style={tone: kind}", "data.max_length=5")
    assert "style applies only to captioner, and the model is a pi07: remove it" in message
    assert re.search("data.max_length applies only to Qwen3-VL.*captioner, and the mo", message)
    assert isinstance(load_run_config(write({"config": POLICY}), ["style={}"]), PI07Run)


@pytest.mark.usefixtures("_captioner")
def test_help_lists_common_settings_once_and_then_each_family_s():
    (title, _, common), *families = settings_help()
    assert title == "settings of every run"
    assert "train.seed" in common
    groups = {title: group for title, _, group in families}
    for family, name, default in (
        ("Qwen3-VL, Qwen3.5, Qwen4-Exp, PaddleOCR-VL", "data.max_length", "2048"),
        ("PaddleOCR-VL", "model.save_layout", "hub"),
        ("pi07 policy, pi07 planner", "data.drops.subgoal_drop_prob", "0.75"),
        ("captioner", "style.tone", "plain"),
    ):
        # Families that other tests register may share settings.
        (group,) = (group for title, group in groups.items() if f"of {family}" in title)
        assert group[name][0] == default
        assert not group.keys() & common.keys()
