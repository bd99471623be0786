"""benchmarks/overlap.py: what its ranks measure, its tables, and the model of `mpicomp explain --train`."""

import json
import sys

import pytest
from jobs import ROOT, mpirun

from collectives.planning.links import links_of
from mpicomp_bench import advice

sys.path.append(str(ROOT / "benchmarks"))
import overlap

PROGRAM = ROOT / "benchmarks" / "overlap.py"
RESULTS = json.loads((ROOT / "docs" / "results" / "overlap.json").read_text())
LINKS = {"100mbit": "100mbit:40us", "1gbit": "1gbit:40us"}


def test_ranks_print_a_row_for_each_method():
    options = "--rank", "--through", "start", "--seconds", "0", "--repeats", "1"
    done = mpirun(2, PROGRAM, *options, MPICOMP_PROGRESS="1")
    assert done.returncode == 0, done.stderr
    rows = [
        json.loads(line.removeprefix(overlap.MARK))
        for line in done.stdout.splitlines()
        if line.startswith(overlap.MARK)
    ]
    assert [row["method"] for row in rows] == [*overlap.OURS]
    assert all(row["alone"] > 0 and row["step"] > 0 for row in rows)


def test_rows_are_in_the_order_of_hosts_rates_and_ways():
    places = [overlap.place(row) for row in RESULTS["steps"]]
    assert places == sorted(places)
    hosts = {row["hosts"] for row in RESULTS["steps"]}
    assert hosts >= {2}
    assert len(overlap.shown(RESULTS["steps"])) == 2 + len(RESULTS["steps"])


@pytest.mark.parametrize("rate", LINKS)
def test_hidden_messages_are_predicted_as_they_were_measured(rate):
    """The step of 4 bits whose computation and coding, and whose messages, are those that were measured."""
    (row,) = [
        row
        for row in RESULTS["steps"]
        if (row["hosts"], row["rate"], row["method"], row["through"])
        == (2, rate, "bits=4", "start")
    ]
    parameters = overlap.TENSORS * overlap.LENGTH
    training = advice.Training(2, parameters, 1.0, links_of(LINKS[rate]))
    messages, _ = overlap.parts(row)
    step = advice.overlapped(advice.FEW_BITS, row["coded"], messages, training)
    assert row["step"] == pytest.approx(step, rel=0.15)
