"""What can be checked of slurm/ without a Slurm; tests/slurm runs the scripts."""

import ast
import configparser
import os
import pathlib
import re
import runpy
import signal
import subprocess
import time

import pytest

import mpicomp

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
PAGE = (ROOT / "docs" / "slurm.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_how_to_start_it_and_what_to_change(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n# ")
    assert re.search(rf"^# .*sbatch (.* )?(slurm/)?{script.name}", text, re.MULTILINE)
    assert text.count("# SITE: ") >= 3, "partition, MPI and environment, launcher"
    assert f"slurm/{script.name}" in PAGE


def depended_on(recipe):
    """Yield (package, least version) of a Spack recipe."""
    for node in ast.walk(ast.parse(recipe)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "depends_on":
            name, _, version = node.args[0].value.partition("@")
            yield name.removeprefix("py-"), version.rstrip(":")


def test_the_spack_recipe_asks_for_what_setup_cfg_asks_for():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = dict(
        line.split(" >= ")
        for line in settings["options"]["install_requires"].split("\n")
        if line
    )
    required["python"] = settings["options"]["python_requires"].removeprefix(">=")
    required["setuptools"] = re.search(
        r"setuptools >= (\d+)", (ROOT / "pyproject.toml").read_text()
    ).group(1)
    assert (
        dict(depended_on((ROOT / "slurm" / "spack" / "package.py").read_text()))
        == required
    )


def test_the_easybuild_recipe_asks_for_what_setup_cfg_asks_for():
    (recipe,) = (ROOT / "slurm" / "easybuild").glob("*.eb")
    found = runpy.run_path(str(recipe), {"__name__": "recipe"})
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = {
        line.split(" >= ")[0]
        for line in settings["options"]["install_requires"].split("\n")
        if line
    }
    versions = {name.lower(): version for name, version in found["dependencies"]}
    assert versions.keys() == required - {"numpy"} | {"python", "scipy-bundle"}, (
        "SciPy-bundle has NumPy"
    )
    chain = found["toolchain"]
    assert (
        recipe.name
        == f"mpicomp-{mpicomp.__version__}-{chain['name']}-{chain['version']}.eb"
    )


# What stands for `mpirun python examples/checkpointed_training.py`: it saves when it is
# told to, and takes its time.
TRAINING = """#!/bin/bash
[ "$1" != mpicomp ] || { [ -z "$EARLY" ] || kill -s USR1 "$PPID"; exit 0; }
trap 'told=yes; echo told >> log' USR1
echo started >> log
until [ "$told" ]; do sleep 0.05; done
for part in 1 2 3 4 5 6 7 8; do sleep 0.1; done
echo saved >> log
exit 75
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def a_job(folder, script, **variables):
    """Start a script as Slurm does, with stand-ins for the launcher and for scontrol, which write to `log`."""
    executable(folder / "training", TRAINING)
    executable(folder / "scontrol", '#!/bin/bash\necho "scontrol $*" >> log\n')
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "LAUNCH": "./training",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return subprocess.Popen(
        ["bash", ROOT / "slurm" / script],
        cwd=folder,
        env={**os.environ, **job, **variables},
    )


def wait_for(log, line):
    end = time.monotonic() + 60
    while not log.exists() or line not in log.read_text():
        assert time.monotonic() < end, f"no {line!r} in a minute"
        time.sleep(0.02)


@pytest.mark.parametrize("warnings", [1, 3])
def test_a_job_that_is_warned_more_than_once_saves_and_goes_back_into_the_queue(
    tmp_path, warnings
):
    log = tmp_path / "log"
    job = a_job(tmp_path, "checkpointed_training.sbatch")
    wait_for(log, "started")
    for number in range(1, warnings + 1):
        job.send_signal(signal.SIGUSR1)
        wait_for(log, "told\n" * number)
    assert job.wait(60) == 75
    assert log.read_text().splitlines() == [
        "started",
        *["told"] * warnings,
        "saved",
        "scontrol requeue 7",
    ]


def test_a_job_that_is_warned_before_it_trains_goes_back_into_the_queue(tmp_path):
    assert a_job(tmp_path, "checkpointed_training.sbatch", EARLY="yes").wait(60) == 75
    assert (tmp_path / "log").read_text().splitlines() == ["scontrol requeue 7"]


@pytest.mark.parametrize(
    ("task", "said"),
    [({}, "submit it as an array"), ({"SLURM_ARRAY_TASK_ID": "4"}, "densities")],
)
def test_a_sweep_without_a_density_ends_before_it_begins(tmp_path, task, said):
    command = ["bash", ROOT / "slurm" / "bench_sweep.sbatch"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "LAUNCH": "false", **task},
        capture_output=True,
    )
    assert run.returncode != 0
    assert said in run.stderr.decode()


@pytest.mark.parametrize(
    ("program", "seen"), [("train.py", "5"), ("-m collectives.torch train.py", "4,5")]
)
def test_a_script_for_torchrun_sees_all_gpus_of_its_node_and_another_program_one(
    tmp_path, program, seen
):
    executable(
        tmp_path / "python",
        "#!/bin/bash\necho $CUDA_VISIBLE_DEVICES $MPICOMP_TIMEOUT\n",
    )
    executable(tmp_path / "mpicomp", "#!/bin/bash\n")
    job = {
        "LAUNCH": "env OMPI_COMM_WORLD_LOCAL_RANK=1",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "USER": "me",
    }
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", ROOT / "slurm" / "gpu.sbatch", *program.split()]
    run = subprocess.run(
        command, env={**os.environ, **job}, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{seen} 600\n"
