"""What is said of Open MPI's failure detector, and the clock of a deadline: no MPI, no second rank."""

import argparse
import io
import warnings

import pytest

from collectives.faults import deadline, ulfm
from mpicomp_bench import info

SET = {f"{ulfm.ENVIRONMENT}{name}": value for name, value in ulfm.SETTINGS.items()}
OFF = "is off, so recovery across hosts may hang"


def settings(**changes):
    """Return the environment under the recommended flags, with some settings of the detector otherwise."""
    return SET | {f"{ulfm.ENVIRONMENT}mpi_ft_{name}": value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        (SET, None),
        (settings(detector_timeout="60.0"), None),
        ({}, OFF),
        (settings(detector="false"), OFF),
        (settings(detector="0"), OFF),
        (settings(detector_thread="1"), "has a thread (mpi_ft_detector_thread), with which ranks may disagree"),
        (settings(detector_timeout="10"), "takes a rank for dead after 10 s outside of MPI"),
        (settings(detector_timeout="soon"), "takes a rank for dead after 0 s outside of MPI"),
        ({"OMPI_MCA_mpi_ft_detector": "true"}, "takes a rank for dead after 10 s outside of MPI"),
    ],
)
def test_a_detector_that_is_not_set_for_several_hosts_comes_with_the_remedy(environment, wrong):
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
    ulfm._warn_once.cache_clear()
    yield monkeypatch
    ulfm._warn_once.cache_clear()


def test_rank_0_warns_once_where_there_are_several_nodes(surviving):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nodes, rank in ((0, 0, 0), 0), ((0, 0, 2), 1):
            ulfm.warn_of_detector(nodes, rank)
        assert not caught
        for _ in range(2):
            ulfm.warn_of_detector((0, 0, 2), 0)
    assert [str(each.message).partition(",")[0] for each in caught] == ["the failure detector of Open MPI is off"]


def test_a_filter_that_raises_does_not_part_rank_0_from_the_others(surviving):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ulfm.warn_of_detector((0, 1), 0)
    assert ulfm._warn_once.cache_info().misses == 1  # it was said, and raised nothing here


def test_info_says_whether_the_job_continues(surviving):
    assert info.recovery(1) == "the job continues when a rank dies (ULFM), on one host"
    assert info.recovery(2).startswith("warning: the failure detector of Open MPI is off")
    for name, value in SET.items():
        surviving.setenv(name, value)
    assert info.recovery(2) == "the job continues when a rank dies (ULFM); the failure detector is set"
    surviving.setattr(ulfm, "survives", lambda: False)
    assert info.recovery(2).startswith("the job ends when a rank dies; ")


def test_info_prints_the_options_of_mpirun():
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False, recovery=True), out) == 0
    assert out.getvalue() == f"{ulfm.FLAGS}\n"
    assert ulfm.FLAGS.startswith("--with-ft ulfm --mca mpi_ft_detector true ")


def test_a_clock_counts_the_time_in_which_its_rank_ran(monkeypatch):
    now = 100.0
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now)
    clock, waited = deadline.Clock(2.0), []
    for later in (0.5, 1.0, 0.5, 1.1, 0.5, 1.0, 0.75):  # 1.1 s is more than half of the timeout: it did not run
        now += later
        waited.append(clock.waited())
    assert waited == [0.5, 1.5, 2.0, 0.0, 0.5, 1.5, 2.25]
    clock.restart()
    assert clock.waited() == 0.0
    short = deadline.Clock(1e-4)  # a pause between two looks takes longer, and must not keep it from its end
    now += 1e-3
    assert short.waited() > 1e-4
    forever = deadline.Clock(None)
    now += 1e9
    assert forever.waited() == 1e9
