"""The race of benchmarks/race: methods train, rows become tables and figures, quantisers have known errors."""

import json
import pathlib
import sys

import numpy as np
import pytest
from jobs import mpirun

RACE = pathlib.Path(__file__).parent.parent / "benchmarks" / "race"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Let the modules of the race import each other, as when one of them is the script."""
    monkeypatch.syspath_prepend(str(RACE))


def trained(tmp_path, *arguments):
    file = tmp_path / "rows.json"
    done = mpirun(2, RACE / "rank.py", f"--json={file}", *arguments, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["method"]: [list(each) for each in zip(*row["curve"], strict=True)] for row in json.load(file.open())}


@pytest.mark.slow
def test_the_characters_are_trained(tmp_path):
    curves = trained(tmp_path, "--model=characters", "--steps=40", "--methods", "topk-0.05", "local-sparse-5")
    for _, _, _, losses in curves.values():
        assert losses[-1] < losses[0] - 1


def test_starts_depend_on_the_seed_alone_and_batches_on_the_rank_too():
    import characters

    def trainer(*seed_and_rank):
        made = characters.Trainer(*seed_and_rank, 2)
        made.optimise("dense", 0.1)
        return made

    first, second, other, again = (trainer(*each) for each in ((0, 0), (0, 1), (1, 0), (0, 0)))
    start = first.arrays["network"].copy()
    assert np.array_equal(start, second.arrays["network"])
    assert not np.array_equal(start, other.arrays["network"])
    first.step(0)
    second.step(0)
    assert not np.array_equal(first.arrays["network"], second.arrays["network"])
    again.step(0)
    assert np.array_equal(first.arrays["network"], again.arrays["network"])


def row(method, seed, *curve, learning_rate=1e-3, sitting="one"):
    links = {"model": "gpt", "hosts": 4, "rate": "100mbit", "delay": 0.0, "limit": 10.0, "ranks": 4, "parameters": 1000}
    about = {"method": method, "learning_rate": learning_rate, "trials": 3, "seed": seed, "sitting": sitting}
    return {**links, **about, "curve": [list(point) for point in curve]}


ROWS = [
    row("dense", 0, (0, 0, 0, 4.0), (10, 5, 50e6, 2.0)),
    row("dense", 1, (0, 0, 0, 4.0), (10, 5, 50e6, 2.2), sitting="two"),
    row("dense", 0, (0, 0, 0, 4.0), (10, 5, 50e6, 2.4), learning_rate=2e-3),
    row("local-sparse-5", 0, (0, 0, 0, 4.0), (2, 10, 1e6, 2.5), (4, 20, 2e6, 1.7), (12, 60, 6e6, 1.0)),
    row("local-sparse-5", 1, (0, 0, 0, 4.0), (2, 10, 1e6, 2.5), (4, 20, 2e6, 1.7), (12, 60, 6e6, 1.2)),
]


def test_the_table_says_when_a_method_reaches_the_best_other_loss():
    from results import settings, sittings, table

    ((setting, by_method),) = settings(ROWS).items()
    alone = row("alone", 0, (0, 0, 0, 4.0), (10, 100, 0, 2.0), sitting="two")
    lines = table(setting, by_method, sittings([alone], "gpt")).splitlines()
    assert lines[0] == "gpt, 1,000 parameters, 4 hosts at 100mbit, 10 s"
    assert lines[2] == "A step of computing alone, ms, by sitting: one: not measured, two: 100."
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]]
    assert cells[0][:5] == ["method", "rate (tried)", "runs", "ms a step", "MB sent a step"]
    assert cells[0][5:] == ["loss", "s to 2.10", "MB to 2.10"]
    assert cells[2] == ["dense", "0.001 (3)", "2", "2000", "10", "2.10 +- 0.10", "-", "-"]  # one training does not
    assert cells[3][:3] == ["dense", "0.002 (3)", "1"]
    assert cells[4] == ["local-sparse-5", "0.001 (3)", "2", "200", "0.1", "1.10 +- 0.10", "3", "1.5"]


def test_rows_that_the_file_has_are_not_measured_again(tmp_path, monkeypatch, capsys):
    import race

    file, plot, ups, asked = tmp_path / "race.json", tmp_path / "race.png", [], []
    pytest.importorskip("matplotlib")

    def measured(wanted, options):
        asked.append((wanted["rate"], wanted["delay"], wanted["seed"], wanted["method"]))
        return None if len(asked) == 3 else {**ROWS[0], **wanted}

    monkeypatch.setattr(race, "measured", measured)
    monkeypatch.setattr(race, "testbed", lambda options, *arguments: ups.append(arguments) or ["true"])
    monkeypatch.setattr(race.metadata, "version", lambda name: "1.0")
    line = ["race.py", "--json", str(file), "--methods", "dense", "--seconds", "10", "--rates", "100mbit"]
    monkeypatch.setattr(sys, "argv", line)
    assert race.main() == 1  # the second seed failed
    assert race.main() == 0
    alone = ("100mbit", 0, 0, "alone")  # once in a sitting
    assert asked == [alone, *[("100mbit", 0, seed, "dense") for seed in (0, 1, 1)]]
    monkeypatch.setattr(sys, "argv", [*line, "1gbit", "--delay", "2.5", "--plot", str(plot)])
    assert race.main() == 0
    late = "--delay=2.5ms"
    assert ups[-4:] == [("up", "4", "100mbit", late), ("down",), ("up", "4", "1gbit", late), ("down",)]
    assert asked[4:] == [(rate, 2.5, seed, "dense") for rate in ("100mbit", "1gbit") for seed in (0, 1)]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("s to 2.00") == 4
    assert len(json.loads(file.read_text())["rows"]) == 7
