"""`paddle-vl report --seeds`.

Guarantees: runs of equal settings but for the seed are one run of means, with a band, at the steps
that all have; others stay alone; the results tell mean and range; without the option nothing
is joined.
"""

from paddle_vl.cli.main import main
from paddle_vl.report.panels import panels_of
from paddle_vl.report.runs import read_runs
from paddle_vl.report.seeds import by_seed
from paddle_vl.report.summary import tables_of
from tests.single_card_tests.report.run_folders import SETTINGS, write_run


def runs_of_two_settings(folder):
    """Seeds 0 and 1 of one, seed 0 of another."""
    made = []
    for name, seed, rate, losses in (
        ("a-0", 0, 0.1, (4.0, 2.0, 9.0)),
        ("a-1", 1, 0.1, (5.0, 3.0)),
        ("b-0", 0, 0.2, (6.0, 5.0)),
    ):
        lines = [
            {"step": step, "loss": loss, "epoch": step / 10, "step_seconds_max": loss}
            for step, loss in zip((10, 20, 30), losses, strict=False)
        ]
        train = {"output_dir": name, "seed": seed, "learning_rate": rate}
        made.append(write_run(folder / name, lines, SETTINGS | {"train": train}))
    return made


def test_seeds_are_a_mean_with_a_band(tmp_path):
    joined, other = by_seed(read_runs(runs_of_two_settings(tmp_path)))
    assert (joined.name, other.name) == ("a-0 (2 seeds)", "b-0")
    assert joined.settings is not None
    assert joined.settings["train.seed"] == [0, 1]
    found = {key: (one.steps, one.values) for key, one in joined.series.items()}
    assert found == {
        "loss": ([10, 20], [4.5, 2.5]),
        "loss_min": ([10, 20], [4.0, 2.0]),
        "loss_max": ([10, 20], [5.0, 3.0]),
        # Equal in all, and a statistic already.
        "epoch": ([10, 20], [1.0, 2.0]),
        "step_seconds_max": ([10, 20], [4.5, 2.5]),
    }
    loss = next(panel for panel in panels_of([joined, other]) if panel.name == "loss")
    looks = {(curve.run, curve.statistic): curve.look for curve in loss.curves}
    assert looks.keys() == {(0, None), (0, "min"), (0, "max"), (1, None)}
    assert len({looks[0, None], looks[0, "min"], looks[0, "max"]}) == 1
    results = dict(tables_of([joined, other])[0].rows)
    assert results["last loss"] == ["2.5 (2 to 3)", "5"]


def test_option_joins_them_on_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(folder) for folder in runs_of_two_settings(tmp_path)]
    for options, is_joined in (([], False), (["--seeds"], True)):
        assert main(["report", *runs, "--no-png", *options]) == 0
        assert ("(2 seeds)" in (tmp_path / "report/report.html").read_text()) == is_joined
