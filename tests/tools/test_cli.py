"""Every subcommand of `mpicomp`: help with examples, errors that help, files written whole; and `mpicomp info`."""

import argparse
import errno
import io
import json
import os
import shlex
import sys

import numpy as np
import pytest
from commands import PARSER, SUBCOMMANDS, left
from jobs import environment, python
from mpi4py import MPI

from collectives import GradientExchange
from collectives.runtime import launcher
from mpicomp import TopK
from mpicomp_bench import files, info, main
from mpicomp_bench.options import WIDTH, above_zero, not_negative, positive, share

# what must be given
NEEDED = {"mpicomp explain": ["--ranks=4", "--length=100"]}
OPTIONS = [
    pytest.param(
        prog, action, id=f"{prog.removeprefix('mpicomp ')} {action.option_strings[0]}"
    )
    for prog, each in SUBCOMMANDS.items()
    for action in each._actions
    if action.option_strings and action.nargs != 0
]
QUICK = [
    "bench",
    "allgather",
    "--lengths",
    "500",
    "--densities",
    "0.1",
    "--repeats",
    "1",
    "--baselines",
    "dense",
]


def test_info_prints_the_versions_and_mpi(capsys):
    assert main(["info"]) == 0
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert lines.keys() >= {
        "python",
        "mpicomp",
        "numpy",
        "numba",
        "mpi4py",
        "MPI",
        "ranks",
        "launcher",
        "arrays",
        "bfloat16",
    }
    assert lines["ranks"] == "1 on 1 host"
    assert lines["launcher"].startswith("none; mpirun -n 2 mpicomp info says")
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["warning"]) == ("1 on 1 host", None)


NO_FOLDER = """
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []  # none finds a folder: a read-only installation without a home folder
import numpy as np
from mpicomp import TopK
from mpicomp_bench import main
print(TopK(k=1).compress(np.arange(9.0)).indices)
main(["info"])
"""


def test_kernels_without_a_folder_to_cache_them_work_and_warn_once():
    without = {k: v for k, v in environment().items() if k != "NUMBA_CACHE_DIR"}
    done = python("-c", NO_FOLDER, env=without)
    assert done.returncode == 0, done.stderr
    assert "[8]\n" in done.stdout
    assert "kernels  not cached: set NUMBA_CACHE_DIR\n" in done.stdout
    assert done.stderr.count("set NUMBA_CACHE_DIR to a writable folder") == 1


@pytest.mark.parametrize("name", launcher.LAUNCHER_SIZES)
def test_a_launcher_of_another_mpi_is_noticed(name, monkeypatch):
    assert launcher.singleton_warning(4, {name: "4"}) is None
    assert f"{name}=4, and MPI sees 1" in launcher.singleton_warning(1, {name: "4"})
    monkeypatch.setenv(name, "4")
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False, recovery=False), out) == 1
    assert "warning: the launcher says" in out.getvalue()


def test_a_launcher_that_fits_is_named():
    fits = info.launcher(4, {"PMI_SIZE": "4", "HOME": "/"})
    assert fits == "fits this MPI: PMI_SIZE=4, and MPI sees as many ranks"
    assert info.launcher(1, {"PMI_SIZE": "4"}).startswith("does not fit this MPI")
    job = {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}
    assert "OMPI_COMM_WORLD_SIZE=4" in info.launcher(4, job)
    assert info.launcher(1, {}).startswith("none; ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "fpu avx512_bf16 amx_bf16",
            "computed by this processor (amx_bf16, avx512_bf16)",
        ),
        ("fp asimd bf16", "computed by this processor (bf16)"),
        (
            "fpu avx2 avx512f",
            "emulated on this processor, as torch.optim.Muon needs it",
        ),
    ],
)
def test_info_says_whether_the_processor_computes_in_bfloat16(flags, said, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert info.bfloat16(file).startswith(said)
    assert info.bfloat16(tmp_path / "missing").startswith("emulated")


def test_the_innermost_launcher_is_believed():
    """Inside a batch job mpirun starts one daemon a node through srun: 2 tasks for Slurm, 4 ranks for MPI."""
    assert (
        launcher.singleton_warning(
            4, {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}
        )
        is None
    )


def test_torchrun_is_noticed(monkeypatch):
    """Its processes are ranks of torch, and each of them is alone for MPI."""
    assert launcher.torchrun_warning(2, {"WORLD_SIZE": "2"}) is None
    assert launcher.torchrun_warning(1, {"WORLD_SIZE": "²"}) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False, recovery=False), out) == 1
    assert "warning: torchrun says WORLD_SIZE=2, and MPI sees 1" in out.getvalue()
    assert (
        "start with: mpirun -n 2 python -m collectives.torch train.py" in out.getvalue()
    )
    with pytest.raises(RuntimeError, match="each process would train alone"):
        GradientExchange(MPI.COMM_SELF.Dup(), TopK(0.1))(np.ones(9))


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with the files that the examples read."""
    folder = tmp_path_factory.mktemp("examples")
    np.savez(folder / "gradients.npz", gradient=np.ones(1000, np.float32))
    return folder


@pytest.mark.parametrize("prog", SUBCOMMANDS)
def test_help_shows_examples_that_are_understood(prog, examples, capsys, monkeypatch):
    monkeypatch.chdir(examples)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([*prog.split()[1:], "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    lines = [
        line.strip()
        for line in said.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    ]
    assert len(lines) == 2
    assert max(map(len, said.splitlines())) <= WIDTH
    _, about, *_ = said.split("\n\n")
    assert about.endswith("."), about
    assert "\n" not in about, about
    for line in lines:
        command = line[line.index("mpicomp ") :]
        assert command.startswith(prog)
        files.check_files(
            SUBCOMMANDS[prog].parse_args(shlex.split(command)[len(prog.split()) :])
        )


@pytest.mark.parametrize(("prog", "action"), OPTIONS)
def test_a_wrong_value_is_refused_with_what_is_expected(prog, action, capsys):
    value = "/missing/folder/file.png" if action.dest in ("json", "captured") else "???"
    option = action.option_strings[0]
    status, error = left(
        [*prog.split()[1:], *NEEDED.get(prog, []), f"{option}={value}"], capsys
    )
    assert status == 2
    assert error.startswith(f"{prog}: error: argument {option}: ")
    assert any(
        word in error for word in ("expected", "choose from", "cannot be read")
    ), error


@pytest.mark.parametrize(
    ("kind", "wrong", "expected"),
    [
        (
            positive,
            ["0", "-3", "x", "2.5", "nan", "inf", "", "2e18", "M", "0.1k1", "2Q"],
            "a whole number of at least 1",
        ),
        (share, ["0", "2", "-0.1", "nan", "few"], "0 < density <= 1"),
        (above_zero, ["0", "-1", "inf", "nan", "fast"], "a number above 0"),
        (not_negative, ["-1", "inf", "nan"], "a number of at least 0"),
    ],
)
def test_the_types_of_options(kind, wrong, expected):
    assert kind("1") == 1
    for value in wrong:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            kind(value)
        assert str(error.value).startswith(f"got {value!r}: expected {expected}")


def test_a_length_may_be_written_as_one_reads_it():
    assert (
        positive("25_000_000") == positive("25e6") == positive("25000000") == 25_000_000
    )
    assert positive("25M") == positive("0.025B") == positive("25000k") == 25_000_000
    assert positive("9007199254740993") == 9007199254740993


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["explain", *NEEDED["mpicomp explain"], "--nodes=2"],
            "--nodes=2 is not expected (is --per-node meant?); see",
        ),
        (
            ["explain", *NEEDED["mpicomp explain"], "--zzz"],
            "--zzz is not expected; see",
        ),
        (["benhc"], "'explain'"),
        (["bench", "allredcue"], "'allreduce'"),
        ([], "COMMAND"),
    ],
)
def test_an_unknown_command_or_option(given, said, capsys):
    status, error = left(given, capsys)
    assert status == 2
    assert said in error


def test_out_of_memory_is_an_error_and_no_traceback(capsys):
    assert main(["bench", "exchange", "--length", "1e18"]) == 1
    said = capsys.readouterr().err.splitlines()  # kernels may be compiled first
    assert said[-1].startswith("mpicomp bench exchange: out of memory: ")
    assert len(said) <= 2


@pytest.fixture
def target(tmp_path):
    """A file that exists already."""
    file = tmp_path / "rows.json"
    file.write_text("old")
    return file


def failing(file):
    file.write_text("half of")
    raise OSError(errno.ENOSPC, "No space left on device")


def asked(command):
    return PARSER.parse_args(shlex.split(command))


def test_a_file_is_written_whole_or_not_at_all(target, capsys):
    options = asked(f"bench gtopk --json {target}")
    assert files.write(options, json=failing) == 1
    assert target.read_text() == "old"
    assert capsys.readouterr().err == (
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
            assert (
                files.write(
                    asked(f"bench compressors --json {file}"),
                    json=lambda file: file.write_text("new"),
                )
                == 0
            )
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [file.stat().st_mode & 0o777 for file in (target, fresh)] == [0o640, 0o640]


def test_a_file_that_cannot_be_written_is_an_error_and_no_traceback(
    target, capsys, monkeypatch
):
    monkeypatch.setattr(files, "_replace", lambda path, make: failing(path))
    assert main([*QUICK, "--json", str(target)]) == 1
    assert "name another file with --json" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["info"], ["info", "--json"], QUICK])
def test_without_an_mpi_it_says_how_to_get_one(command, monkeypatch, capsys):
    # importing it raises ImportError
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    monkeypatch.delattr("mpi4py.MPI")
    assert main(command) == 1
    said = "".join(capsys.readouterr())
    assert "mpi4py finds no MPI library" in said
    assert "module load openmpi" in said
    assert "pip install" in said
    assert "Traceback" not in said
