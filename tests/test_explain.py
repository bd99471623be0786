"""`mpicomp explain`, and what `mpicomp tune` does on one rank; the formulas are tested in tests/test_choice.py."""

import json
import subprocess
import sys

import numpy as np
import pytest
from commands import left

from collectives import gtopk_allreduce, quantised_allreduce
from collectives.choice import winners
from collectives.choice.formulas import FORMULAS
from collectives.choice.links import NETWORKS, links_of
from collectives.choice.predictions import ON_NODES
from mpicomp import SparseVector
from mpicomp_bench import main, tune
from mpicomp_bench.explain import FEW_BITS, PASSES
from mpicomp_bench.network import Network

SOME = ["explain", "--ranks", "64", "--length", "1e6", "--density", "0.001"]


def explained(capsys, *more):
    assert main([*SOME, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(found):
    return {(row["operation"], row["algorithm"]): row for row in found["rows"]}


def test_explain_has_a_row_for_each_algorithm_for_an_exchange_and_for_a_step(capsys):
    rows = by_name(explained(capsys, "--per-node", "8", "--step", "0.2"))
    known = {("gtopk_allreduce", name) for name in gtopk_allreduce.algorithms}
    known |= {("sparse_allreduce", name) for name in (*FORMULAS["sparse_allreduce"], *ON_NODES["sparse_allreduce"])}
    known |= {("sparse_reduce", "tree"), ("sparse_bcast", "tree"), ("sparse_reduce_scatter", "split")}
    known |= {
        ("quantised_allreduce", f"{name}, {bits} bits")
        for name in (*quantised_allreduce.algorithms, "auto")
        for bits in FEW_BITS
    }
    known |= {("GradientExchange", name) for name in (*PASSES, "sparse_allreduce", "gtopk_allreduce")}
    known |= {("step of 0.2 s", name) for name in ("by sparse_allreduce", "by gtopk_allreduce", "dense allreduce")}
    assert known <= set(rows)
    collective, exchange, step = (
        rows[name]["speedup"]
        for name in (
            ("gtopk_allreduce", "auto"),
            ("GradientExchange", "gtopk_allreduce"),
            ("step of 0.2 s", "by gtopk_allreduce"),
        )
    )
    assert collective > exchange > step > 1
    assert main(SOME) == 0
    table = capsys.readouterr().out
    assert table.startswith("64 ranks on 64 nodes; 1000 of 1000000 entries each; their union: ")
    assert not any(name in table for name in (*ON_NODES["sparse_allreduce"], "step of"))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", ["1", "2", "3", "64", "1000000"])
def test_no_prediction_is_below_the_least_bytes(capsys, ranks, network):
    assert (
        main(["explain", "--ranks", ranks, "--length", "1e8", "--density", "0.01", "--network", network, "--json"]) == 0
    )
    rows = by_name(json.loads(capsys.readouterr().out))
    for (operation, name), row in rows.items():
        if (operation, "least bytes") in rows:
            assert row["bytes"] >= 0.99 * rows[operation, "least bytes"]["bytes"], (operation, name)


def test_overlap_and_few_bits_lower_the_bytes(capsys):
    def sent(*more, by="split_allgather"):
        return by_name(explained(capsys, *more))["sparse_allreduce", by]["bytes"]

    assert sent("--overlap", "1") < sent("--overlap", "0.5") < sent()
    bits = [sent("--value-bits", bits, by="allgather") for bits in ("1", "16", "25", "32")]
    assert bits == sorted(set(bits))
    assert sent() < sent("--value-bytes", "8")


def test_the_longest_length_is_explained(capsys):
    longest = ["--length", str(2**63 - 1), "--density", "1e-12"]
    assert main(["explain", "--ranks", "8", *longest, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 2**63 - 1


def test_explain_starts_no_mpi():
    code = f"import sys; from mpicomp_bench import main; main({SOME}); assert 'mpi4py.MPI' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ranks", "1000001", "expected 1 to 1000000 ranks"),
        ("--length", "1e19", "expected a whole number of at least 1 and at most 9223372036854775807"),
        ("--density", "0", "expected 0 < density <= 1"),
        ("--overlap", "1.1", "expected -1 <= overlap <= 1"),
        ("--overlap", "nan", "expected -1 <= overlap <= 1"),
        ("--step", "0", "expected a number above 0"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_expected(option, value, said, capsys):
    status, error = left([*SOME, f"{option}={value}"], capsys)
    assert (status, said in error) == (2, True)


def test_tune_writes_a_table_and_checks_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "loops_of", lambda call, comm: 1)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    grid = ["--lengths", "300", "--densities", "0.1", "0.5", "0.1", "--repeats", "1"]
    assert main(["tune", *grid]) == 0
    path = winners.default_path(1, 1)
    assert f"written to {path}" in capsys.readouterr().out
    assert {name: len(places) for name, places in winners.load(path)["winners"].items()} == dict.fromkeys(tune.SUMS, 2)
    assert main(["tune", "--profile", str(path), "--check", *grid, "--json", str(tmp_path / "rows.json")]) == 0
    said, found = capsys.readouterr().out, json.loads((tmp_path / "rows.json").read_text())
    assert f"within 15 % of the best algorithm in {found['best']:.0%} of the grid" in said
    assert len(found["rows"]) == 2 * (6 + 4 + 2 + 2 + 1)


def test_tune_refuses_options_that_do_not_go_together(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(winners.text_of({"host": "a", "mpi": "b", "ranks": 1, "nodes": 1, "winners": {}}))
    for more, said in (
        (["--profile", str(path)], "--profile is there for --check"),
        (["--profile", str(path), "--output", str(path), "--check"], "give one of them"),
        (["--json", str(path)], "--json holds what --check finds"),
    ):
        assert main(["tune", *more]) == 2
        assert said in capsys.readouterr().err
    path.write_text(path.read_text()[:100])
    assert "it is not a table of winners" in left(["tune", "--check", "--profile", str(path)], capsys)[1]


def test_a_table_that_cannot_be_written_is_an_error(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert main(["tune", "--lengths", "300", "--densities", "0.1", "--repeats", "1"]) == 1
    assert "name another file with --output" in capsys.readouterr().err


def test_the_verdict_counts_places():
    def rows(length, auto, dense):
        found = {"recursive_doubling": 1.0, "dense": 3.0, tune.AUTO: auto, tune.RULE: 1.2}
        place = {"length": length, "density": 0.1, "bits": 32.0}
        seconds = {("sparse_allreduce", name): taken for name, taken in found.items()}
        seconds |= {("gtopk_allreduce", name): 1.0 for name in ("exact", tune.AUTO, tune.RULE)}
        seconds[tune.DENSE, "mpi"] = dense
        return [{**place, "collective": of, "algorithm": name, "seconds": s} for (of, name), s in seconds.items()]

    found = tune.verdict([*rows(1, 1.1, 1.05), *rows(2, 1.2, 1.05), *rows(3, 1.0, 2.0), *rows(4, 1.14, 0.5)])
    assert (found["best"], found["dense"], found["gtopk"]) == (0.75, 0.5, 1)
    assert (found["rule_best"], found["rule_dense"], found["rule_gtopk"]) == (0, 0.25, 1)


@pytest.mark.parametrize(
    ("text", "delay", "rate"),
    [
        ("10gbit:50us", 50e-6, 1.18e9),
        ("40gbit", 10e-6, 4.72e9),
        ("50mbit:20ms", 20e-3, 5.9e6),
        ("50mbit", 100e-6, 5.9e6),
    ],
)
def test_a_network_of_ones_own_has_a_rate_and_a_delay(text, delay, rate):
    found = links_of(text)
    assert (found.latency, found.rate) == pytest.approx((delay, rate))
    assert links_of("10gbit").rate == links_of("10gbit:1us").rate == NETWORKS["10gbit"].rate


def test_a_faster_network_of_ones_own_makes_every_sum_faster(capsys):
    def taken(network):
        assert main([*SOME, "--network", network, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        return {(row["operation"], row["algorithm"]): row["seconds"] for row in rows if row["seconds"] and row["bytes"]}

    fast, slow = taken("25gbit:20us"), taken("10gbit:20us")
    assert len(fast) > 10
    assert all(fast[each] < slow[each] for each in fast if each[1] != "auto")


def test_what_is_no_network_is_refused(capsys):
    status, line = left([*SOME, "--network", "25gb"], capsys)
    assert status == 2
    assert "expected one of 100mbit, 1gbit, 10gbit, 25gbit, 100gbit, hdr, or a rate" in line


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 1), (8, 1), (13, 1), (8, 2), (12, 4)])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_in_few_bits_are_predicted_with_the_rounds_and_bytes_of_the_network(capsys, ranks, per_node, bits):
    length, network = 100_000, [rank // per_node * per_node for rank in range(ranks)]
    asked = f"explain --ranks {ranks} --per-node {per_node} --length {length} --density 0.01 --json"
    assert main(asked.split()) == 0
    rows = by_name(json.loads(capsys.readouterr().out))
    for name, steps in quantised_allreduce.algorithms.items():
        if ("quantised_allreduce", f"{name}, {bits} bits") not in rows:
            assert (name, per_node) == ("node_lanes", 1)
            continue
        simulated = Network(ranks, network)
        own = {"bits": bits, "block": 256, "out": None, "array": np.ones(length, "f4")}

        def run(rank, group, steps=steps, own=own):
            return steps(SparseVector.empty(length), group, **own)

        _, rounds = simulated.run(run, length=length)
        row = rows["quantised_allreduce", f"{name}, {bits} bits"]
        assert abs(row["rounds"] - rounds) <= 2 * (name == "node_lanes"), name
        assert row["bytes"] == pytest.approx(max(link.traffic.nbytes for link in simulated.links), rel=0.04, abs=2000)
