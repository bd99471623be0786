"""Files that the command line is given: looked at on rank 0, written whole or not at all; and what they say."""

import errno
import json
import os
import shlex

import pytest
from test_cli_options import left
from test_train import SHORT, mpirun

from collectives.cli import bench, explain, files, info, main, parser, train, tune
from collectives.cli.bench import chart

QUICK = ["bench", "allgather", "--lengths", "500", "--densities", "0.1", "--repeats", "1", "--baselines", "dense"]


def asked(command):
    return parser([info, bench, train, tune, explain]).parse_args(shlex.split(command))


@pytest.fixture
def target(tmp_path):
    """A file that is there already."""
    file = tmp_path / "rows.json"
    file.write_text("old")
    return file


def failing(file):
    file.write_text("half of")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_written_whole_or_not_at_all(target, capsys):
    options = asked(f"bench gtopk --json {target}")
    assert files.write(options, json=failing) == 1
    assert target.read_text() == "old"
    said = capsys.readouterr().err
    assert said == (
        f"mpicomp bench gtopk: cannot write {target}: No space left on device; name another file with --json\n"
    )
    assert files.write(options, json=lambda file: file.write_text("new")) == 0
    assert target.read_text() == "new"
    assert os.listdir(target.parent) == ["rows.json"]


def test_a_link_stays_one_and_permissions_are_the_usual(target, tmp_path):
    link, fresh = tmp_path / "link.json", tmp_path / "fresh.json"
    link.symlink_to(target)
    target.chmod(0o640)
    before = os.umask(0o027)
    try:
        for file in link, fresh:
            assert files.write(asked(f"tune --check --json {file}"), json=lambda file: file.write_text("new")) == 0
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [file.stat().st_mode & 0o777 for file in (target, fresh)] == [0o640, 0o640]


@pytest.mark.parametrize("command", [QUICK, [*SHORT, "--methods", "dense"], ["bench", "kernels", "--length", "1000"]])
def test_what_cannot_be_written_is_an_error_and_no_traceback(command, target, capsys, monkeypatch):
    monkeypatch.setattr(files, "_replace", lambda path, make: failing(path))
    assert main([*command, "--json", str(target)]) == 1
    assert "name another file with --json" in capsys.readouterr().err


def test_what_is_no_regular_file_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "lost").symlink_to(tmp_path / "none" / "file")
    for name, wrong in ("pipe", "a device, a pipe"), ("link", "a device, a pipe"), ("lost", "there is no folder"):
        status, _, said = left([*QUICK, "--json", str(tmp_path / name)], capsys)
        assert status == 2
        assert wrong in said.splitlines()[-1]


def test_a_folder_that_takes_no_file_is_refused(target, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "takes no new file" in left([*QUICK, "--json", str(target)], capsys)[2]


ELSEWHERE = """
import os, sys
from mpi4py import MPI
from collectives.cli import main
os.chdir(sys.argv[1] if MPI.COMM_WORLD.rank == 0 else "/")
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("files_of", "status"), [("rows.json", 0), ("none/rows.json", 2)])
def test_files_are_looked_at_on_rank_0_alone(files_of, status, tmp_path):
    """The other rank sees neither the folder nor the file, and ends as rank 0 does."""
    (tmp_path / "run.py").write_text(ELSEWHERE)
    (tmp_path / "there").mkdir()
    command = [str(tmp_path / "run.py"), str(tmp_path / "there"), *QUICK, "--json", f"../there/{files_of}"]
    done = mpirun(2, *command, cwd=tmp_path, module=())
    assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "there" / "rows.json").exists() == (status == 0)
    assert done.stderr.count("there is no folder") == (status == 2)


def test_a_file_is_drawn_once(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    same = os.path.join(tmp_path, ".", "rows.json")
    assert "twice" in left(["bench", "plot", str(tmp_path / "x.png"), str(file), same], capsys)[2]


def test_rows_say_how_they_were_measured(tmp_path):
    file = tmp_path / "rows.json"
    some = shlex.split("--length 400 --tensors 3 --compute 0.001 --repeats 1 --density 0.1 0.1 --link 1e9")
    assert main(["bench", "overlap", *some, "--json", str(file)]) == 0
    about = json.loads(file.read_text())
    asked_for = {"tensors": 3, "compute": 0.001, "repeats": 1, "density": [0.1], "link": 1e9, "length": 400}
    assert about["options"] == {"subject": "overlap", **asked_for}
    assert [row["name"] for row in about["rows"]] == ["0.1 overlapped, a bucket a tensor"]


def test_more_tensors_than_values_are_refused(capsys):
    assert main(["bench", "overlap", "--length", "3", "--tensors", "4"]) == 2
    assert "expected at most as many --tensors as --length, got 4" in capsys.readouterr().err


def test_contestants_of_a_figure_look_different():
    pytest.importorskip("matplotlib")
    from collectives.cli.colours import look_of

    assert len({look_of(place)["color"] for place in range(20)}) == 20
    assert len({tuple(look_of(place).items()) for place in range(140)}) == 140


def test_a_legend_stands_outside_the_panels(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    file = tmp_path / "rows.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    chart.plot(json.loads(file.read_text())["rows"], tmp_path / "x.png")
    assert len(drawn[0].legends) == 1
    assert all(axes.get_legend() is None for axes in drawn[0].axes)


def test_what_does_not_fit_into_memory_is_said_plainly(capsys):
    assert main(["bench", "exchange", "--length", "1e18"]) == 1
    assert capsys.readouterr().err.startswith("mpicomp bench exchange: what was asked for does not fit into memory: ")
