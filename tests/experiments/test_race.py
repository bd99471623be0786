"""The race of experiments/race: rows become tables. It trains in tests/pytorch/test_scripts.py."""

import pathlib

import pytest

RACE = pathlib.Path(__file__).parents[2] / "experiments" / "race"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Let the modules of the race import each other, as when one of them is the script."""
    monkeypatch.syspath_prepend(str(RACE))


def row(method, seed, *curve, learning_rate=1e-3, sitting="one", optimizer="adamw"):
    training = {
        "model": "gpt",
        "batch": 4,
        "sleep": 0.0,
        "schedule": "linear",
        "ranks": 4,
        "parameters": 1000,
    }
    links = {"hosts": 4, "rate": "100mbit", "delay": 0.0, "limit": 10.0}
    about = {
        "method": method,
        "learning_rate": learning_rate,
        "trials": 3,
        "seed": seed,
        "sitting": sitting,
    }
    return {
        **training,
        **links,
        **about,
        "optimizer": optimizer,
        "curve": [list(point) for point in curve],
    }


ROWS = [
    row("dense", 0, (0, 0, 0, 4.0), (10, 5, 50e6, 2.0)),
    row("dense", 1, (0, 0, 0, 4.0), (10, 5, 50e6, 2.2), sitting="two"),
    row("dense", 0, (0, 0, 0, 4.0), (10, 5, 50e6, 2.4), learning_rate=2e-3),
    row(
        "local-sparse-5",
        0,
        (0, 0, 0, 4.0),
        (2, 10, 1e6, 2.5),
        (4, 20, 2e6, 1.7),
        (12, 60, 6e6, 1.0),
    ),
    row(
        "local-sparse-5",
        1,
        (0, 0, 0, 4.0),
        (2, 10, 1e6, 2.5),
        (4, 20, 2e6, 1.7),
        (12, 60, 6e6, 1.2),
    ),
    row(
        "dense", 1, (0, 0, 0, 4.0), (10, 5, 50e6, 2.0), sitting="two", optimizer="muon"
    ),
]


def test_the_table_says_when_a_method_reaches_the_best_other_loss():
    from results import settings, sittings, table

    ((setting, by_method),) = settings(ROWS).items()
    alone = row("alone", 0, (0, 0, 0, 4.0), (10, 100, 0, 2.0), sitting="two")
    lines = table(setting, by_method, sittings([alone], setting)).splitlines()
    assert (
        lines[0]
        == "gpt, 1,000 parameters, batches of 4, linear rate, 4 hosts at 100mbit, 10 s"
    )
    said = "A step of computing alone, ms, by sitting: one: not measured, two: 100, two (muon): not measured."
    assert lines[2] == said
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:]
    ]
    assert cells[0][:5] == [
        "method",
        "rate (tried)",
        "runs",
        "ms a step",
        "MB sent a step",
    ]
    assert cells[0][5:] == ["loss", "s to 2.00", "MB to 2.00"]
    # one training does not
    assert cells[2] == [
        "dense",
        "0.001 (3)",
        "2",
        "2000",
        "10",
        "2.10 +- 0.10",
        "-",
        "-",
    ]
    assert cells[3][:3] == ["dense", "0.002 (3)", "1"]
    assert cells[4] == [
        "local-sparse-5",
        "0.001 (3)",
        "2",
        "200",
        "0.1",
        "1.10 +- 0.10",
        "3",
        "1.62",
    ]
    assert cells[5] == [
        "dense (muon)",
        "0.001 (3)",
        "1",
        "2000",
        "10",
        "2.00",
        "10",
        "50",
    ]


def test_a_method_with_settings_takes_the_rate_that_was_tried_with_or_without_them():
    """Else that of none: 4 rates were tried of local steps of Muon in 4 bits, and none in 2 bits."""
    from joining import GIVEN, rate_of

    tried = rate_of("local-few-bits-10", "muon", "linear")
    assert tried.trials > 1
    assert tried == rate_of("local-few-bits-10:bits=2", "muon", "linear")
    assert tried != GIVEN == rate_of("local-few-bits-7:bits=2", "muon", "linear")
    own = rate_of("in-basis-8:basis=none", "sgd", "constant")
    assert own != rate_of("in-basis-8", "sgd", "constant")
