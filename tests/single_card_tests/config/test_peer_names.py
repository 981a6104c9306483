"""Names that are no setting.

Guarantees: names of other trainers and typing errors lead to the right setting; misspelt parts of
the model are refused before anything is built.
"""

import pytest

from paddle_vl.config.peer_names import PEERS, setting_for
from tests.single_card_tests.config.test_load import MINIMAL, all_descriptions, problems


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("train.lr", "train.learning_rate"),
        ("learning_rate", "train.learning_rate"),
        ("train.gradient-checkpointing", "train.recompute=full"),
        ("model.lora.lora_rank", "model.lora.r"),
        ("moe_expert_capacity_factor", "parallel.expert_capacity_factor"),
        ("data.max_lenght", "data.max_length"),
    ],
)
def test_name_of_another_trainer_leads_to_the_setting(run_file, name, setting):
    told = f"command line: {name} is not a setting; did you mean {setting}?"
    lora = "model.lora.target_modules=all-linear"
    assert told in problems(run_file, f"{name}=1", *[lora] * name.startswith("model.lora"))


def test_section_of_another_trainer_leads_to_the_settings(run_file):
    message = problems(run_file, "optimizer={lr: 1, weight_decay: 0, x: 3}")
    told = "train.learning_rate for optimizer.lr, train.weight_decay for optimizer.weight_decay?"
    assert message == f"command line: optimizer is not a setting; did you mean {told}"


def test_names_of_other_trainers_lead_to_settings_that_exist():
    known = all_descriptions()
    for setting, names in PEERS.items():
        assert setting.partition("=")[0] in known
        for name in names.split():
            assert name not in known
            assert setting_for(name, known) == setting


def test_names_that_resemble_a_setting_of_another_section_by_chance_lead_nowhere():
    known = all_descriptions()
    assert [setting_for(name, known) for name in ("train.rnk", "optim")] == [None] * 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.freeze=[visoin]", "model.freeze: no part of the model is called 'visoin'; did you "
         "mean vision? (the parts are vision, mergers, language)"),
        ("train.part_learning_rates={languag: 0.1}", "did you mean language?"),
        ("model.lora={target_modules: all-linear, modules_to_save: [merger]}",
         "model.lora.modules_to_save: no part of the model is called 'merger'; did you mean merg"),
    ],
)  # fmt: skip
def test_misspelt_part_of_the_model_is_refused_when_the_file_is_read(run_file, override, part):
    assert part in problems(run_file, override)
