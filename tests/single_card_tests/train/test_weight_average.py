"""The moving average of the weights (`train.ema`), in buckets and without, and in a run."""

import numpy as np
import paddle
import pytest
from paddle.base.framework import EagerParamBase
from safetensors.numpy import load_file

from paddle_vl.cli.main import main
from paddle_vl.config.schema import EMAConfig, TrainConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.testing import record_host_reads
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.schedule import average_decay
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import build, evaluated
from tests.support.finished_runs import arrays_of, metrics_of
from tests.support.states import states_of

DECAYS = [0.5, 0.9, 0.75]


@pytest.mark.parametrize("flat", [False, True], ids=["per tensor", "buckets"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_follows_its_formula_and_is_exchanged_with_the_weights(dtype, flat):
    rng = np.random.default_rng(0)
    parameters = [
        EagerParamBase.from_tensor(
            paddle.to_tensor(rng.normal(size=shape), dtype=dtype), trainable=True
        )
        for shape in [(3, 50), (7,)]
    ]
    named = [("a", parameters[0]), ("b", parameters[1])]
    train = TrainConfig(output_dir="o", max_grad_norm=0.0, ema=EMAConfig())
    optimizer = Optimizer(named, train, set(), MasterWeights(parameters))
    if flat:
        optimizer.use_buckets()
    masters = {name: optimizer.store.shard_of(p) for name, p in named}
    expected = {name: master.numpy().astype(np.float64) for name, master in masters.items()}
    for step, decay in enumerate([*DECAYS, 0.5]):
        is_good = paddle.to_tensor(step < len(DECAYS))
        for parameter in parameters:
            factors = paddle.to_tensor(rng.normal(size=parameter.shape), dtype="float32")
            (parameter.astype("float32") * factors).sum().backward()
        optimizer.store.end_micro_batch()
        optimizer.store.end_backward()
        norm = float(optimizer.squared_norm().sqrt())
        with record_host_reads() as reads:
            if step < len(DECAYS):
                optimizer.update(0.1, norm)
            optimizer.update_average(decay, is_good)
        assert reads == []
        optimizer.clear_gradients()
        if step < len(DECAYS):
            for name, master in masters.items():
                expected[name] = decay * expected[name] + (1 - decay) * master.numpy()
    before = states_of(optimizer)
    live = [parameter.astype("float32").numpy() for parameter in parameters]
    for name, array in expected.items():
        assert before[f"{name}/ema"].dtype == np.float32
        np.testing.assert_allclose(before[f"{name}/ema"], array, rtol=0, atol=1e-6)
    optimizer.swap_average()
    for name, parameter in named:
        rounded = paddle.to_tensor(before[f"{name}/ema"]).astype(dtype).astype("float32")
        np.testing.assert_array_equal(parameter.astype("float32").numpy(), rounded.numpy())
    optimizer.swap_average()
    after = states_of(optimizer)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    for parameter, array in zip(parameters, live, strict=True):
        np.testing.assert_array_equal(parameter.astype("float32").numpy(), array)


def test_decays_of_openpi_and_lerobot():
    assert [average_decay(EMAConfig(), step) for step in (1, 2, 9)] == [0.99] * 3
    warmup = EMAConfig(schedule="warmup")
    found = [average_decay(warmup, step) for step in (1, 2, 17, 10**7)]
    assert found == pytest.approx([0.0, 1 - 2**-0.75, 1 - 17**-0.75, 0.9999])


def train(run_file, output_dir, *more: str) -> None:
    data = run_file.with_name("test.jsonl")
    given = ["train.ema={decay: 0.6}", *evaluated(data), *more]
    assert build(run_file, output_dir, *given).run() is None


def test_a_run_evaluates_and_leaves_the_average(tmp_path, capsys):
    run_file = write_tiny_run(tmp_path)
    train(run_file, tmp_path / "out")
    train(run_file, tmp_path / "plain", "train.ema=null")
    found, other = (arrays_of(tmp_path / name / "checkpoint-4") for name in ("out", "plain"))
    assert found.keys() - other.keys() == {f"{n}/ema" for n in other if "/" not in n}
    for name, array in other.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for name, array in load_file(tmp_path / "out" / "final" / "model.safetensors").items():
        average = found[f"{name}/ema"]
        # State has the layout of this package.
        assert any(np.array_equal(array, a.reshape(array.shape)) for a in (average, average.T)), (
            name
        )
    lines = [line for line in metrics_of(tmp_path / "out") if "eval_loss" in line]
    # Last, since a command turns compiled kernels on.
    assert main(["evaluate", str(tmp_path / "out"), "--data", str(tmp_path / "test.jsonl"),
                 "--max-new-tokens", "1"]) == 0  # fmt: skip
    assert f"{lines[-1]['eval_loss']:.4f}" in capsys.readouterr().out
