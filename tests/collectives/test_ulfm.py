"""What is said of Open MPI's failure detector, and how long a rank has waited: no MPI, no second rank."""

import argparse
import io
import warnings
from itertools import accumulate

import pytest

from collectives.faults import ulfm
from collectives.runtime import engine
from mpicomp_bench import info

SET = {f"{ulfm.ENVIRONMENT}{name}": value for name, value in ulfm.SETTINGS.items()}
OFF = "is off, so recovery across hosts may hang"


def settings(**changes):
    """Return the environment under the recommended flags, with some settings of the detector otherwise."""
    return SET | {
        f"{ulfm.ENVIRONMENT}mpi_ft_{name}": value for name, value in changes.items()
    }


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        (SET, None),
        (settings(detector_timeout="60.0"), None),
        ({}, OFF),
        (settings(detector="false"), OFF),
        (settings(detector="0"), OFF),
        (
            settings(detector_thread="1"),
            "has a thread (mpi_ft_detector_thread), with which ranks may disagree",
        ),
        (
            settings(detector_timeout="10"),
            "takes a rank for dead after 10 s outside of MPI",
        ),
        (
            settings(detector_timeout="soon"),
            "takes a rank for dead after 0 s outside of MPI",
        ),
        (
            {"OMPI_MCA_mpi_ft_detector": "true"},
            "takes a rank for dead after 10 s outside of MPI",
        ),
    ],
)
def test_a_detector_that_is_not_set_for_several_hosts_comes_with_the_remedy(
    environment, wrong
):
    said = ulfm.detector_warning(environment)
    if wrong is None:
        assert said is None
    else:
        assert said.startswith(f"the failure detector of Open MPI {wrong}")
        assert said.endswith(f"start with mpirun {ulfm.FLAGS}")


@pytest.fixture
def surviving(monkeypatch):
    """A job under ULFM, without the detector, as far as `ulfm` sees."""
    monkeypatch.setattr(ulfm, "survives", lambda: True)
    monkeypatch.delenv("OMPI_MCA_mpi_ft_detector", raising=False)
    ulfm.warn_once.cache_clear()
    yield monkeypatch
    ulfm.warn_once.cache_clear()


def test_rank_0_warns_once_where_there_are_several_nodes(surviving):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nodes, rank in ((0, 0, 0), 0), ((0, 0, 2), 1):
            ulfm.warn_of_detector(nodes, rank)
        assert not caught
        for _ in range(2):
            ulfm.warn_of_detector((0, 0, 2), 0)
    assert [str(each.message).partition(",")[0] for each in caught] == [
        "the failure detector of Open MPI is off"
    ]


def test_a_filter_that_raises_does_not_part_rank_0_from_the_others(surviving):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ulfm.warn_of_detector((0, 1), 0)
    # it was said, and raised nothing here
    assert ulfm.warn_once.cache_info().misses == 1


def test_info_says_whether_the_job_continues(surviving):
    assert info.recovery(1) == "the job continues when a rank dies (ULFM), on one host"
    assert info.recovery(2).startswith(
        "warning: the failure detector of Open MPI is off"
    )
    for name, value in SET.items():
        surviving.setenv(name, value)
    assert (
        info.recovery(2)
        == "the job continues when a rank dies (ULFM); the failure detector is set"
    )
    surviving.setattr(ulfm, "survives", lambda: False)
    assert info.recovery(2).startswith("the job ends when a rank dies; ")


def test_info_prints_the_options_of_mpirun():
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False, recovery=True), out) == 0
    assert out.getvalue() == f"{ulfm.FLAGS}\n"
    assert ulfm.FLAGS.startswith("--with-ft ulfm --mca mpi_ft_detector true ")


@pytest.mark.parametrize(
    ("timeout", "steps", "expected"),
    [
        (
            2.0,
            (0.5, 1.0, 0.5, 1.25, 0.5, 1.0, 0.75),
            [0.5, 1.5, 2.0, 0.0, 0.5, 1.5, 2.25],
        ),
        (1e-4, (1e-3,), [1e-3]),  # a round of polling may take longer than the timeout
        (None, (1e9,), [1e9]),
    ],
)
def test_a_wait_counts_the_time_in_which_its_rank_ran(
    monkeypatch, timeout, steps, expected
):
    """If two rounds are more than half of the timeout apart, it did not run: 1.25 s of 2."""
    clock, waited = iter(accumulate(steps, initial=0.0)), []
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(engine.time, "sleep", lambda seconds: None)
    polling = engine.Engine()
    polling.timeout = timeout
    polling.poll_until(lambda: len(waited) == len(steps), waited.append)
    assert waited == expected
