"""Profiles: what is written is read back, and what is no profile is refused, whatever it is."""

import contextlib
import json
import math
from dataclasses import replace

import fuzz_profiles
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collectives.profiles import (
    KERNELS,
    LARGEST_FILE,
    NETWORKS,
    Curve,
    ProfileError,
    as_measured,
    checksum,
    default_path,
    host_group,
    library_name,
    load,
    parse,
    rising,
)

PROFILE = NETWORKS["1gbit"]


def signed(figures):
    """Return the text of a file with these figures and the right checksum: what a hostile writer can make."""
    return json.dumps({"mpicomp_profile": 1, "checksum": checksum(figures), "profile": figures})


def figures():
    return json.loads(PROFILE.text())["profile"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_profile_survives_its_file(name, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(NETWORKS[name].text())
    assert load(path) == NETWORKS[name]
    assert parse(replace(PROFILE, between=None).text()).between is None


@given(cut=st.integers(0, len(PROFILE.text()) - 2))
def test_a_truncated_file_is_refused(cut):
    with pytest.raises(ProfileError, match="run `mpicomp tune` again"):
        parse(PROFILE.text()[:cut])


@given(place=st.integers(0, len(PROFILE.text()) - 1), character=st.characters())
def test_a_changed_file_is_refused_or_says_the_same(place, character):
    text = PROFILE.text()
    with contextlib.suppress(ProfileError):
        assert parse(text[:place] + character + text[place + 1 :]) == PROFILE


@given(text=st.text())
@example("[" * 100_000)
@example("9" * 10_000)
@example('{"mpicomp_profile": 1, "checksum": "", "profile": NaN}')
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ProfileError):
        parse(text)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(name=st.sampled_from([*figures(), "more"]), value=ANYTHING)
@example("ranks", 0)
@example("ranks", True)
@example("ranks", 2**40)
@example("nodes", 3)
@example("call", -1e-9)
@example("call", 1e300)
@example("call", 10**400)
@example("host", "")
@example("host", "a\nb")
@example("reduce", [])
@example("inside", [])
@example("reduce", [[64, 1e-6]] * 65)
@example("reduce", [[64, 1e-6], [64, 2e-6]])
@example("reduce", [[64, 2e-6], [128, 1e-6]])
@example("reduce", [[64, 0], [128, 0]])
@example("reduce", [[0, 5e-5], [5e-324, 1.0]])
@example("kernels", {name: [[1, 1]] for name in KERNELS[1:]})
def test_figures_beyond_their_limits_are_refused_though_the_checksum_is_right(name, value):
    """What gets through is within the limits: each curve then gives finite seconds."""
    try:
        found = parse(signed({**figures(), name: value}))
    except ProfileError:
        return
    assert name != "more"
    curves = [found.inside, found.between, found.reduce, *found.kernels.values()]
    assert all(math.isfinite(curve(size)) for curve in curves if curve for size in (0, 64, 1e12))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ranks", 0, "ranks is 0: expected a whole number"),
        ("call", -1, "call has -1 seconds: expected 0 to"),
        ("host", 7, "host is '7': expected a name"),
        ("reduce", [[64, 2e-6], [128, 1e-6]], "expected a larger size, no less time"),
        ("reduce", "fast", "reduce is no list of 1 to 64 points"),
        ("nodes", 3, "2 ranks on 3 nodes"),
    ],
)
def test_the_error_says_what_is_wrong(name, value, said):
    with pytest.raises(ProfileError, match=said):
        parse(signed({**figures(), name: value}))


def test_another_version_is_refused():
    whole = json.loads(PROFILE.text())
    with pytest.raises(ProfileError, match="it is of version 2, expected 1"):
        parse(json.dumps({**whole, "mpicomp_profile": 2}))


def test_a_profile_without_any_link_is_refused():
    with pytest.raises(ProfileError, match="expected a link"):
        parse(replace(PROFILE, inside=None, between=None).text())


def test_files_that_cannot_be_read_are_named(tmp_path):
    for content in b"\xff\xfe", b" " * (LARGEST_FILE + 1), b"{}":
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(ProfileError, match="broken"):
            load(tmp_path / "broken")
    for missing in tmp_path / "missing", tmp_path:
        with pytest.raises(ProfileError, match="cannot be read"):
            load(missing)


@given(
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=8, unique=True),
    times=st.lists(st.floats(1e-9, 10), min_size=8, max_size=8),
    asked=st.floats(0, 1e10),
)
def test_a_curve_never_falls(sizes, times, asked):
    curve = rising([(size, time) for size, time in zip(sorted(sizes), times, strict=False)])
    assert 0 <= curve(asked) <= curve(2 * asked + 1) + 1e-12
    assert curve(min(sizes)) == curve.start


@given(
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=8, unique=True),
    times=st.lists(st.floats(1e-9, 10), min_size=8, max_size=8),
)
def test_a_curve_may_fall_but_not_at_its_end(sizes, times):
    points = [(float(size), time) for size, time in zip(sorted(sizes), times, strict=False)]
    curve = as_measured(points)
    assert list(curve.points[:-1]) == points[:-1]
    assert [curve(size) for size, _ in points[:-1]] == pytest.approx([time for _, time in points[:-1]])
    last_size, last = curve.points[-1]
    assert last >= points[-1][1]
    assert curve(last_size) == pytest.approx(last)
    assert curve(2 * last_size + 1) >= last * (1 - 1e-12)
    assert parse(replace(PROFILE, reduce=curve).text()).reduce == curve


def test_a_curve_goes_through_its_points_and_on():
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)))
    assert [curve(size) for size in (0, 10, 15, 20, 30, 40, 80)] == [1, 1, 1.5, 2, 2.5, 3, 5]
    assert Curve.line(2.0, 100.0)(300) == pytest.approx(5.0)


def test_where_a_profile_is_kept():
    home = {"HOME": "/home/me"}
    path = default_path("node", "Open MPI v5.0.11", 4, 2, home)
    assert str(path) == "/home/me/.config/mpicomp/node-Open_MPI_v5.0.11-P4-N2.json"
    elsewhere = default_path("../../etc", "x/y", 4, 2, home | {"XDG_CONFIG_HOME": "/conf"})
    assert str(elsewhere.parent) == "/conf/mpicomp"
    assert default_path("node", "MPI", 4, 2, home | {"XDG_CONFIG_HOME": "relative"}).is_relative_to("/home/me")


def test_names_of_hosts_and_libraries():
    assert [host_group(name) for name in ("node017.cluster", "node-3", "7", "vm")] == ["node", "node", "7", "vm"]
    assert library_name("Open MPI v5.0.11, package: Open MPI root@x Distribution\0") == "Open MPI v5.0.11"
    assert library_name("MPICH Version:\t4.2.1\nMPICH Release date") == "MPICH 4.2.1"
    assert library_name("\0") == "MPI"


def test_broken_files_are_refused_or_give_finite_curves():
    """Damaged texts, and what a hostile writer signs; the script runs millions."""
    counts = fuzz_profiles.run(2000, seed=0)
    assert counts["refused"] > 1000
    assert counts["parsed"] > 20
