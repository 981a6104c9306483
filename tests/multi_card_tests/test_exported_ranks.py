"""An export of tensor-parallel ranks answers as the full model does, on real processes over gloo.

Guarantees: equal tokens at shapes that the export has not seen, with sequence parallelism, images,
videos, padding and sampling; a program has the collectives that theory says, no control flow and
no host operation; folders are refused by name in a wrong number of processes, damaged, or with
options that do not go together. Export itself runs every rank and compares it with the model.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.cli.main import main
from paddle_vl.export import load
from paddle_vl.export.rank_writing import export_ranks
from paddle_vl.export.ranks import RING
from paddle_vl.export.writing import ProgramToExport, answer_of
from paddle_vl.families.qwen3_vl.program_examples import prompt_example
from paddle_vl.families.qwen3_vl.programs import PrefillProgram
from paddle_vl.families.qwen3_vl.rank_programs import ranks_to_export
from paddle_vl.parallel.traced_rank import TracedRank
from paddle_vl.testing import run_ranks
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.single_card_tests.export.test_exported_qwen3_vl import BATCHES
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor
from tests.support.exports import HOST_OPERATIONS, operations
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tiny import tiny_model

NAMES = ("text", "mixed", "padded")
SAMPLED = {"do_sample": True, "seed": 3, "temperature": 1.5}
COLLECTIVES = ("mp_allreduce_sum", "all_gather", "reduce_scatter")
LAYERS = 3


def exported(root: Path, mp_degree: int, sequence_parallel: bool, **text_overrides):
    """A model, and the folder of its ranks."""
    model = tiny_model(vocab_size=320, **text_overrides)
    model.save_pretrained(root / "checkpoint")
    ranks = ranks_to_export(
        model,
        lambda placement: type(model).from_pretrained(root / "checkpoint", placement=placement),
        lambda rank: TracedRank(rank, mp_degree, RING),
        mp_degree,
        sequence_parallel,
        tiny_processor().save_pretrained,
    )
    export_ranks(ranks, mp_degree, Path("tiny"), root / "out")
    return model, root / "out"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("ranks"), 2, True)


@pytest.fixture(scope="module")
def folder(made) -> Path:
    return made[1]


def answers(folder: str) -> dict:
    """What a rank says about the cases."""
    model = load(folder)

    def refusal() -> str:
        with pytest.raises(ValueError, match="sample without a seed") as caught:
            model.generate(**BATCHES["text"], do_sample=True)
        return str(caught.value)

    def tokens(name: str, **settings) -> list:
        return model.generate(**BATCHES[name], max_new_tokens=6, **settings).tolist()

    return run_checks(
        {name: lambda name=name: tokens(name) for name in NAMES}
        | {"sampled": lambda: tokens("text", **SAMPLED), "refusal": refusal}
    )


@pytest.fixture(scope="module")
def outcomes(folder):
    return launch(answers, processes=2, arguments=[str(folder)])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_every_rank_are_those_of_the_model(made, outcomes, name):
    wanted = made[0].generate(**BATCHES[name], max_new_tokens=6).tolist()
    assert outcome_of(outcomes, name) == [wanted] * 2


def test_sampled_tokens_of_every_rank_are_those_of_the_model(made, outcomes):
    wanted = made[0].generate(**BATCHES["text"], max_new_tokens=6, **SAMPLED).tolist()
    assert outcome_of(outcomes, "sampled") == [wanted] * 2


def test_ranks_that_would_draw_different_tokens_are_refused(outcomes):
    assert "give the same seed on every rank" in outcome_of(outcomes, "refusal")[0]


def collectives(file: Path) -> dict[str, int]:
    found = Counter(operations(file))
    assert not set(found) & {*HOST_OPERATIONS, "while", "c_identity"}
    return {name: found[name] for name in COLLECTIVES if found[name]}


def test_programs_have_the_collectives_of_theory(folder):
    """A layer has two products that are summed over the ranks; the embedding is summed, the logits
    are gathered, and with split rows so are the last ones. A CPU has no reduce-scatter."""
    for rank in range(2):
        own = folder / f"rank_{rank}"
        decode = {"mp_allreduce_sum": 1 + 2 * LAYERS, "all_gather": 1}
        assert collectives(own / "decode.json") == decode
        gathered = 2 * LAYERS + 1 + 1
        prefill = {"mp_allreduce_sum": 1 + 2 * LAYERS, "all_gather": gathered}
        assert collectives(own / "prefill.json") == prefill
        on_gpu = {"mp_allreduce_sum": 1, "all_gather": gathered, "reduce_scatter": 2 * LAYERS}
        assert collectives(own / "gpu" / "prefill.json") == on_gpu
    assert collectives(folder / "tower.json") == {}


def test_a_rank_has_its_share_of_the_weights_once(made, folder):
    sizes = [(folder / f"rank_{rank}" / "decoder.pdiparams").stat().st_size for rank in range(2)]
    parameters = made[0].named_parameters()
    full = sum(4 * int(p.size) for name, p in parameters if not name.startswith("visual"))
    assert all(full / 2 < size < full / 2 * 1.25 for size in sizes)
    assert sorted(path.name for path in folder.rglob("*.pdiparams")) == [
        "decoder.pdiparams", "decoder.pdiparams", "tower.pdiparams",
    ]  # fmt: skip


def test_another_number_of_processes_is_refused(folder):
    with pytest.raises(ValueError, match=r"2 tensor-parallel ranks, but 1 process.* start 2"):
        load(folder)


def test_onnxruntime_is_refused(folder):
    with pytest.raises(ValueError, match="no programs for onnxruntime"):
        load(folder, "onnxruntime")


def test_the_manifests_belong_together(folder):
    shared = json.loads((folder / "export.json").read_text())
    assert shared["mp_degree"] == 2
    assert shared["sequence_parallel"]
    assert {"rank_0/export.json", "rank_1/export.json"} <= set(shared["files"])
    own = json.loads((folder / "rank_1" / "export.json").read_text())
    assert own["rank"] == 1
    assert set(own["files"]) == {
        "check.safetensors", "decode.json", "decoder.pdiparams", "gpu/prefill.json", "prefill.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequence-parallel"], "give --mp-degree, too"),
        (["--mp-degree", "2", "--int8"], "leave --int8 out"),
        (["--mp-degree", "2", "--dtype", "float16"], "leave --dtype float16 out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(made, folder, capsys, options, message):
    checkpoint = folder.parent / "checkpoint"
    out = folder.parent / "refused"
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(out), *options]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_layers_of_programs_agree_with_the_model_on_simulated_ranks(made, sequence_parallel):
    """In eager mode, on four ranks, two for each key head."""
    model, folder = made
    example = prompt_example(model, np.random.default_rng(0), 12)
    wanted = answer_of(ProgramToExport(PrefillProgram(model), "", example))

    def step(placement) -> list[np.ndarray]:
        own = type(model).from_pretrained(folder.parent / "checkpoint", placement=placement)
        return answer_of(ProgramToExport(PrefillProgram(own, 4), "", example))

    ranks = run_ranks(step, 4, sequence_parallel=sequence_parallel, vision="replicate")
    for rank, found in enumerate(ranks.results):
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
        for own, whole in zip(found[1:], wanted[1:], strict=True):
            head = rank // 2
            np.testing.assert_allclose(own, whole[:, head : head + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("mp_degree", "sequence_parallel", "overrides"),
    [(4, True, {}), (2, False, EXPERTS), (2, True, EXPERTS)],
)
def test_ranks_that_share_key_heads_and_experts(tmp_path, mp_degree, sequence_parallel, overrides):
    model, folder = exported(tmp_path, mp_degree, sequence_parallel, **overrides)
    found = launch(answers, processes=mp_degree, arguments=[str(folder)])
    for name in NAMES:
        wanted = model.generate(**BATCHES[name], max_new_tokens=6).tolist()
        assert outcome_of(found, name) == [wanted] * mp_degree
