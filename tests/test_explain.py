"""`mpicomp explain` and what `mpicomp tune` does on one rank; the figures are those of tests/test_cost.py."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from collectives import cost, tuning
from collectives.cli import main
from collectives.cli.tune import calibrating, checking, measuring
from collectives.cli.tune.checking import Checked, verdict
from collectives.profiles import KERNELS, NETWORKS, VARIABLE, load, parse
from collectives.tuning import Tuner, choose_allreduce, without_survey
from mpicomp import SparseVector
from mpicomp.codec import CODECS

SOME = ["explain", "--ranks", "64", "--length", "1e6", "--density", "0.001"]


def explained(capsys, *more):
    assert main([*SOME, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_explain_has_a_row_for_each_algorithm_and_the_lower_bound(capsys):
    found = explained(capsys)
    known = {(operation, name) for operation, names in cost.OPERATIONS.items() for name in [*names, "lower bound"]}
    nodes = {("sparse_allreduce", "node_lanes"), ("sparse_allreduce", "node_leaders")}
    known.add(("sparse_allreduce", "auto"))
    assert {(row["operation"], row["algorithm"]) for row in found["rows"]} == known - nodes
    assert {(row["operation"], row["algorithm"]) for row in explained(capsys, "--per-node", "8")["rows"]} == known
    assert main(SOME) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(found["rows"])
    assert table[-1].split()[1:] == ["auto", *table[-1].split()[2:5], "by", found["auto"]]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", ["1", "2", "3", "4", "5", "64", "1000", "1000000"])
def test_no_prediction_is_below_the_bound_and_auto_is_the_fastest(capsys, ranks, network):
    how = ["--length", "1e8", "--density", "0.01", "--network", network, "--json"]
    assert main(["explain", "--ranks", ranks, *how]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["operation"], row["algorithm"]): row for row in found["rows"]}
    for (operation, name), row in rows.items():
        bound = rows[operation, "lower bound"]
        assert row["bytes"] >= 0.99 * bound["bytes"], (operation, name)
        if operation != "gtopk_allreduce":  # that may take one round of many messages
            assert row["rounds"] >= bound["rounds"]
    model = cost.Model(cost.Case(found["ranks"], 10**8, 10**6, nodes=found["nodes"]), NETWORKS[network])
    sums = {name: cost.ALLREDUCE[name](model).seconds for name in (*cost.FLAT, "dense_mpi")}
    if found["ranks"] > 4:
        assert sums[found["auto"]] <= 1.1 * min(sums.values())  # it counts entries in steps of 9 %


@pytest.mark.parametrize("value_bytes", ["2", "4", "8"])
@pytest.mark.parametrize("shape", [("16", "8"), ("8", "4"), ("64", "2"), ("12", "5"), ("9", "9"), ("9", "1")])
@pytest.mark.parametrize("density", ["0.0001", "0.01", "1"])
def test_no_time_is_below_the_bound_on_nodes_of_several_ranks(capsys, shape, density, value_bytes):
    ranks, per_node = shape
    for network in NETWORKS:
        how = ["--length", "25e6", "--density", density, "--network", network, "--value-bytes", value_bytes, "--json"]
        assert main(["explain", "--ranks", ranks, "--per-node", per_node, *how]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        bounds = {row["operation"]: row["seconds"] for row in rows if row["algorithm"] == "lower bound"}
        for row in rows:  # inside one node MPI's own sums may be faster than messages of this library
            if ranks != per_node or row["algorithm"] not in ("mpi", "dense_mpi", "auto"):
                assert row["seconds"] >= 0.99 * bounds[row["operation"]], (network, row)


def test_overlap_and_codec_lower_the_bytes(capsys):
    def sent(*more):
        rows = explained(capsys, *more)["rows"]
        return next(row["bytes"] for row in rows if row["algorithm"] == "split_allgather")

    assert sent("--overlap", "1") < sent("--overlap", "0.5") < sent()
    assert sent("--codec", "smallest") < sent("--codec", "plain") < sent("--codec", "plain", "--value-bytes", "8")


@pytest.mark.parametrize(
    ("ranks", "per_node", "said"),
    [
        ("1", "1", "1 rank on 1 node;"),
        ("64", "8", "64 ranks on 8 nodes, 8 a node;"),
        ("16", "5", "16 ranks on 4 nodes, 4 a node (16 is no multiple of 5);"),
        ("20", "8", "20 ranks on 3 nodes, at most 7 a node (20 is no multiple of 8);"),
    ],
)
def test_the_head_says_how_many_ranks_are_on_a_node(ranks, per_node, said, capsys):
    assert main(["explain", "--ranks", ranks, "--per-node", per_node, "--length", "1e6", "--density", "0.1"]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_explain_takes_a_profile(capsys, tmp_path):
    (tmp_path / "profile.json").write_text(NETWORKS["hdr"].text())
    assert explained(capsys, "--profile", str(tmp_path / "profile.json")) == explained(capsys, "--network", "hdr")


def test_explain_starts_no_mpi():
    code = f"import sys; from collectives.cli import main; main({SOME}); assert 'mpi4py.MPI' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True).returncode == 0


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ranks", "0", "expected a whole number of at least 1"),
        ("--ranks", "1000001", "expected 1 to 1000000 ranks"),
        ("--length", "1e19", "expected a whole number of at least 1 and at most 9223372036854775807"),
        ("--length", "many", "expected a whole number of at least 1"),
        ("--density", "0", "expected 0 < density <= 1"),
        ("--overlap", "1.1", "expected 0 <= overlap <= 1"),
        ("--overlap", "nan", "expected 0 <= overlap <= 1"),
        ("--per-node", "0", "expected a whole number of at least 1"),
        ("--network", "token-ring", "invalid choice: 'token-ring'"),
        ("--codec", "zip", "invalid choice: 'zip'"),
        ("--profile", "/missing", "the profile '/missing' cannot be read: No such file"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_expected(option, value, said, capsys):
    assert said in refused([*SOME, f"{option}={value}"], capsys)


def test_what_must_be_given_is_named(capsys):
    assert "--ranks, --length, --density" in refused(["explain"], capsys)


def test_links_that_were_not_measured_are_not_guessed(capsys, tmp_path, monkeypatch):
    quickly(monkeypatch)
    assert main(["tune", "--output", str(tmp_path / "one.json"), "--repeats", "1"]) == 0
    assert "written to" in capsys.readouterr().out
    one = ["--profile", str(tmp_path / "one.json")]
    assert explained(capsys, *one)["nodes"] == 1
    assert main([*SOME, *one, "--per-node", "8"]) == 2
    assert "measured on one node: leave --per-node out" in capsys.readouterr().err


def quickly(monkeypatch):
    monkeypatch.setattr(calibrating, "CASES", [(300, 30)])
    for name, few in ("ENTRIES", [16, 500]), ("MESSAGES", [64, 4096]), ("REDUCTIONS", [64, 4096]), ("LONG_ENOUGH", 0):
        monkeypatch.setattr(measuring, name, few)


def test_tune_writes_a_profile_and_checks_it(capsys, tmp_path, monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["tune", "--repeats", "1"]) == 0
    path = tuning.default_path(1, 1)
    assert f"written to {path}" in capsys.readouterr().out
    assert set(load(path).kernels) == set(KERNELS)
    check = ["--check", "--lengths", "300", "--densities", "0.1", "0.5", "0.1", "--seconds", "0", "--repeats", "1"]
    assert main(["tune", "--profile", str(path), *check, "--json", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "rows.json").read_text())
    assert f"median error of the model {found['median_error']:.0%}" in said
    assert len(found["rows"]) == 2 * (6 + 2 + 4 + 1 + 1 + 1)
    assert all(row["predicted"] > 0 for row in found["rows"] if row["algorithm"] != checking.RULE)


def test_tune_refuses_options_that_do_not_go_together(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(NETWORKS["hdr"].text())
    for more, said in (
        (["--profile", str(path)], "--profile is there for --check"),
        (["--profile", str(path), "--output", str(path), "--check"], "give one of them"),
        (["--json", str(path)], "--json holds what --check finds"),
        (["--lengths", "5"], "--lengths is about the grid of --check"),
        (["--densities", "0.1"], "--densities is about the grid of --check"),
    ):
        assert main(["tune", *more]) == 2
        assert said in capsys.readouterr().err
    path.write_text(path.read_text()[:300])
    assert "is refused: it is no JSON" in refused(["tune", "--check", "--profile", str(path)], capsys)


def test_a_profile_that_cannot_be_written_is_an_error(capsys, tmp_path, monkeypatch):
    quickly(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.setenv(VARIABLE, "none")
    assert main(["tune", "--repeats", "1"]) == 1
    assert "name another file with --output" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "explain"])
def test_help_has_examples_that_are_understood(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.partition("examples:")[2].splitlines()
    examples = [line.split("mpicomp ")[1].split() for line in lines if line.strip()]
    assert len(examples) == 3
    for example in examples:
        assert example[0] == command
        if command == "explain":
            assert main(example) == 0


def test_the_verdict_counts_places():
    def place(length, auto, dense):
        sums = {"recursive_doubling": 1.0, "dense": 3.0, checking.AUTO: auto, checking.RULE: 1.2}
        rows = [Checked("sparse_allreduce", name, length, 0.1, seconds, 1.5) for name, seconds in sums.items()]
        return [*rows, Checked("dense_allreduce", "mpi", length, 0.1, dense, None)]

    found = verdict([*place(1, 1.1, 1.05), *place(2, 1.2, 1.05), *place(3, 1.0, 2.0), *place(4, 1.14, 0.5)])
    assert found["best"] == 0.75
    assert found["dense"] == 0.5
    assert (found["rule_best"], found["rule_dense"]) == (0, 0.25)


@pytest.mark.parametrize("nodes", [[1], [2], [3], [4], [1, 1], [8], [4, 4], [70]])
def test_without_a_profile_the_fixed_rule_stays(nodes):
    tuner, ranks = Tuner(), sum(nodes)
    for entries in 1, 100, 10_000, 100_000:
        counts = [entries] * ranks
        assert tuner.allreduce(100_000, counts, 4, nodes) == choose_allreduce(100_000, counts, 4, nodes)
    assert not tuner.worth_asking(100_000, 4, nodes)
    vector = SparseVector.from_dense(np.array([0, 1.0, 2.0] * 100))
    assert tuner.coding(vector, apart=True) == CODECS["smallest"](vector)
    assert tuner.coding(vector, apart=False) == CODECS["quick"](vector)


def test_the_longest_length_is_explained(capsys):
    assert main(["explain", "--ranks", "8", "--length", str(2**63 - 1), "--density", "1e-12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 2**63 - 1


def test_a_tuner_remembers_a_bounded_number_of_answers():
    tuner = Tuner(NETWORKS["1gbit"])
    for length in range(1, 3 * tuning.REMEMBERED):
        tuner.fastest(length, 1, 4, [8])
    assert len(tuner._answers) <= tuning.REMEMBERED


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [8, 64, 512, 2048])
def test_auto_is_the_best_of_what_it_chooses_from_with_all_that_this_takes(network, ranks):
    """Entries are counted in steps of 9 %, so another one may be a little faster."""
    tuner, nodes = Tuner(NETWORKS[network]), [1] * ranks
    for length, density in product((10**4, 10**6, 10**8), (1e-4, 1e-3, 1e-2, 0.1, 0.3)):
        case = tuning.case_of(length, length * density, 4, nodes)
        model = cost.Model(case, NETWORKS[network])
        start = cost.begun("sparse_allreduce", model)
        every = [
            (start + cost.survey(model, told=name in cost.SAMPLED) + cost.ALLREDUCE[name](model)).seconds
            for name in tuning.candidates(nodes, 4)
        ]
        assert tuner.automatic(case, nodes)[1].seconds <= 1.1 * min(every)


def test_links_that_a_profile_lacks_leave_the_rule():
    one_node = Tuner(measured_on_one_node())
    assert one_node.knows([4])
    assert not one_node.knows([1, 1])
    assert not one_node.worth_asking(10**6, 4, [1, 1])
    assert one_node.allreduce(10**6, [10**6] * 5, 4, [1] * 5) == choose_allreduce(10**6, [10**6] * 5, 4, [1] * 5)
    assert without_survey([1, 1]) == "recursive_doubling"


def test_ranks_do_not_ask_where_that_slows_the_smallest_sums_by_more_than_it_quickens_the_others():
    tuner, nodes, length = Tuner(NETWORKS["1gbit"]), [1] * 4, 100_000
    model = cost.Model(tuning.case_of(length, length, 4, nodes), tuner.profile)
    known = cost.ALLREDUCE[without_survey(nodes)](model)
    assert known.seconds > tuning.WORTH_ASKING * tuner.fastest(length, length, 4, nodes)[1]
    assert not tuner.worth_asking(length, 4, nodes)


def measured_on_one_node():
    return replace(NETWORKS["1gbit"], between=None)


def test_the_codec_follows_the_link():
    """Slow links are worth coding for, fast ones are not."""
    vector = SparseVector(range(0, 1_000_000, 100), [1.1] * 10_000, 1_000_000)
    assert Tuner(NETWORKS["100mbit"]).coding(vector, apart=True) == CODECS["smallest"](vector)
    assert Tuner(NETWORKS["hdr"]).coding(vector, apart=True) == CODECS["quick"](vector)


FIGURES = np.array([2e-4, 3e-5, 5e-5, 1e-4, 1.7, 1.2, 0.9])


def operations():
    """Yield predictions of several operations at 8 ranks on a network, each as a function of the profile."""
    for length, entries in calibrating.CASES:
        for operation, names in cost.OPERATIONS.items():
            for name in names:
                if checking.of_flat_sums(operation, name):
                    case = cost.Case(8, length, entries, nodes=8, codec="quick")
                    yield lambda profile, asked=(operation, name, case): cost.predict(*asked, profile).seconds


def test_a_profile_is_fitted_to_what_operations_take():
    """Times made of known figures give these back; noise on a few of them changes little."""
    profile = NETWORKS["1gbit"]
    slopes = np.array([calibrating.derivatives(seconds, profile) for seconds in operations()])
    truth = calibrating.changed(profile, FIGURES)
    seconds = np.array([predict(truth) for predict in operations()])
    np.testing.assert_allclose(slopes @ FIGURES, seconds, rtol=1e-6)
    found = calibrating.fit(slopes, seconds, calibrating.LEAST)
    np.testing.assert_allclose(found, FIGURES, rtol=1e-3)
    seconds[::7] *= 3
    noisy = calibrating.changed(profile, calibrating.fit(slopes, seconds, calibrating.LEAST))
    errors = [abs(predict(noisy) / predict(truth) - 1) for predict in operations()]
    assert np.median(errors) < 0.1


def test_no_figure_is_fitted_below_its_least():
    """Operations that take next to no time would ask for rounds that give time back."""
    slopes = np.array([calibrating.derivatives(seconds, NETWORKS["1gbit"]) for seconds in operations()])
    found = calibrating.fit(slopes, np.full(len(slopes), 1e-5), calibrating.LEAST)
    assert (found >= calibrating.LEAST).all()
    parse(calibrating.changed(NETWORKS["1gbit"], found).text())
