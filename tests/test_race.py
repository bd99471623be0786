"""The race of benchmarks/race: methods train, rows become tables and figures, quantisers have known errors."""

import json
import pathlib

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
