"""`mpicomp explain`, and what `mpicomp tune` does on one rank; the formulas are tested in tests/test_choice.py."""

import json
import pathlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from commands import left
from mpi4py import MPI

from collectives import gtopk_allreduce, quantised_allreduce
from collectives.choice import winners
from collectives.choice.formulas import FORMULAS
from collectives.choice.links import NETWORKS, links_of
from collectives.choice.predictions import ON_NODES
from mpicomp import SparseVector
from mpicomp_bench import advice, main, tune
from mpicomp_bench.explain import FEW_BITS, PASSES
from mpicomp_bench.network import Network

ROOT = pathlib.Path(__file__).parent.parent
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


TRAIN = ["explain", "--train", "--ranks", "16", "--parameters", "1e8", "--step", "0.2"]


def advised(capsys, *more):
    assert main([*TRAIN, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_steps_and_reads_of_methods_are_those_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "every_step"))
    import condense

    assert condense.FILE.read_text() == condense.text(), "run benchmarks/every_step/condense.py"
    methods = advice.measured()["methods"]
    assert methods["dense"]["steps"] == 1
    assert all(0.5 < each["steps"] < 5 for each in methods.values())
    assert condense.steps_to(2.0, [[100, 3.0], [400, 1.0]]) == pytest.approx(200)
    assert condense.steps_to(4.0, [[100, 3.0], [400, 1.0]]) == pytest.approx(50)


def test_training_takes_less_time_by_other_methods_over_slower_links(capsys):
    taken = [advised(capsys, "--network", network, "--memory", "1000")["take"] for network in ("hdr", "20mbit")]
    assert taken[0] in ("dense", "16 bits")
    assert "two bits" in taken[1]
    rows = {row["method"]: row for row in advised(capsys, "--network", "100mbit")["rows"]}
    late = {row["method"]: row for row in advised(capsys, "--network", "100mbit", "--delay", "50ms")["rows"]}
    assert all(late[name]["messages"] > row["messages"] for name, row in rows.items())
    sixteen, four, basis = (rows[name] for name in ("16 bits", "4 bits", "in a basis, two bits, signs"))
    assert 3.5 < sixteen["messages"] / four["messages"] < 4
    assert 4 < basis["messages"] / rows["local steps, H = 5, two bits"]["messages"] < 6
    assert basis["seconds"] == max(1, basis["steps"]) * (0.2 + basis["compression"] + basis["messages"])


def test_nodes_of_several_ranks_share_their_links(capsys):
    few, many = (advised(capsys, "--network", "1gbit", *more) for more in ((), ("--per-node", "8")))
    dense_of_few, dense_of_many = (
        next(row for row in each["rows"] if row["method"] == "dense") for each in (few, many)
    )
    assert 0.5 < dense_of_many["messages"] / dense_of_few["messages"] < 1  # 2 nodes send less than 16


def test_one_rank_sends_nothing_and_keeps_dense(capsys):
    assert main([*TRAIN, "--ranks", "1"]) == 0
    said = capsys.readouterr().out
    assert "Keep: dense" in said
    assert "mean = dense_allreduce(gradient, comm) / comm.size" in said


@pytest.mark.parametrize("method", advice.METHODS, ids=[method.about for method in advice.METHODS])
def test_the_lines_of_a_method_run(method):
    if method.about == advice.SIXTEEN:
        pytest.importorskip("torch")
        assert "fp16_compress_hook" in method.lines
        return
    comm = MPI.COMM_SELF.Dup()
    names = {"comm": comm, "gradient": np.ones(512, np.float32), "parameters": {"all": np.ones(512, np.float32)}}
    exec(method.lines, names)
    assert any(name in names for name in ("mean", "signs", "outer"))


OF_THE_RACE = {
    "dense": "dense",
    "16 bits": "fp16",
    "8 bits": "few-bits-8",
    "4 bits": "few-bits-4",
    "in a basis, two bits, signs": "in-basis-8-two-bit",
    "Top-k, 1 %": "topk-0.01",
    "local steps, H = 5, two bits": "local-sparse-5",
    "local steps, H = 10, two bits": "local-sparse-10",
}


def test_what_is_advised_is_near_the_best_of_every_race(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "race"))
    from results import by_learning_rate, final, settings

    rows = json.loads((ROOT / "docs" / "results" / "race.json").read_text())["rows"]
    judged = 0
    for (_, hosts, rate, delay, _), by_method in settings(rows).items():
        links = replace(links_of(rate), latency=1e-3 * delay) if delay else links_of(rate)
        taken = OF_THE_RACE[advice.recommended(advice.ranked(hosts, 3_225_600, 0.163, links))]
        losses = {method: final(by_learning_rate(own)[0]) for method, own in by_method.items()}
        if taken in losses:
            judged += 1
            assert losses[taken] < min(losses.values()) + 0.05, (rate, delay, taken)
    assert judged >= 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--ranks=4", "--length=9"], "got no --density: expected --length and --density, or --train with"),
        (["--ranks=4", "--length=9", "--density=1", "--parameters=9"], "expected it with --train only"),
        (["--train", "--ranks=4"], "got no --parameters: expected --parameters and --step with --train"),
        ([*TRAIN[1:], "--density=1"], "got --density: expected it without --train only"),
        ([*TRAIN[1:], "--delay=5"], "got '5': expected a time such as 50us or 5ms"),
        ([*TRAIN[1:], "--memory=0"], "expected a number above 0"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(given, said, capsys):
    status, error = left(["explain", *given], capsys)
    assert (status, said in error) == (2, True), error
