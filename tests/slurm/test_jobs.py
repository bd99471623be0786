"""The scripts under slurm/ run on a real Slurm, on 2 and 4 virtual nodes, started by mpirun and by srun."""

import json
import os
import re
import textwrap

import pytest


def digest(printed):
    """Return the digest of the parameters at the end of a training."""
    (found,) = re.findall(r"parameters ([0-9a-f]{16})", printed)
    return found


def assert_continued(state, printed, whole):
    assert state == "COMPLETED", printed
    assert "saved, to be continued" in printed
    assert re.search(r"step \d+: taken up from checkpoints-\d+/step-", printed), printed
    assert printed.count("check: ") == printed.count(": ok") == 2
    assert digest(printed) == whole


@pytest.fixture(scope="session")
def whole(cluster):
    """Return the digest of a training that nobody interrupts, by the number of steps."""
    example = ("python", "-m", "mpi4py", "examples/checkpointed_training.py")

    def run(steps):
        folder = f"whole-{steps}"
        return digest(
            cluster.call(
                *("mpirun", "-n", "4", "--map-by", ":OVERSUBSCRIBE", *example),
                *("--steps", str(steps), "--folder", folder),
                seconds=300,
            )
        )

    return run


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 2), (4, 1)])
def test_an_example(cluster, launch, nodes, tasks):
    pytest.importorskip("sklearn")
    job = cluster.submit(
        launch,
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks}",
        "example.sbatch",
        "examples/numpy_digits.py",
        "--steps",
        "12",
        "--plot",
        "here.png",
    )
    state, printed = cluster.ended(job)
    assert state == "COMPLETED", printed
    assert re.search(r"ranks +4 on", printed)
    assert printed.count("check: ") == printed.count(": ok") == 5
    assert (cluster.work / "here.png").exists()


def test_local_steps_over_two_partitions(cluster):
    """A heterogeneous job: one world of MPI over both of its components."""
    launch = "srun --het-group=0,1 --mpi=pmix --wait=30"
    job = cluster.submit(
        launch, "--partition=near", ":", "--partition=far", "local_steps.sbatch"
    )
    state, printed = cluster.ended(job)
    assert state == "COMPLETED", printed
    assert re.search(r"ranks +4 on", printed)
    assert printed.count("check: ") == printed.count(": ok") > 0


@pytest.mark.parametrize("wrong", ["srun --mpi=none", "srun --mpi=pmi2"])
def test_a_launcher_that_does_not_fit_the_mpi_stops_the_job_before_the_training(
    cluster, wrong
):
    state, printed = cluster.ended(cluster.submit(wrong, "example.sbatch"))
    assert state == "FAILED"
    assert (
        "the launcher says SLURM_STEP_NUM_TASKS=4, and MPI sees 1" in printed
        or "PMI_SIZE=4" in printed
    ), printed
    assert "check:" not in printed


def test_every_rank_has_a_gpu_of_its_own(cluster, launch):
    program = cluster.work / "own_gpu.py"
    program.write_text(
        textwrap.dedent("""
        import os
        from mpi4py import MPI

        own = os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]
        every = MPI.COMM_WORLD.gather(own)
        if every:
            print("have", *sorted("-".join(own) for own in every))
        """)
    )
    options = "--ntasks-per-node=2", "--gpus-per-node=2"
    state, printed = cluster.ended(
        cluster.submit(launch, *options, "gpu.sbatch", program.name)
    )
    assert state == "COMPLETED", printed
    assert "have n1-0 n1-1 n2-0 n2-1\n" in printed
    state, printed = cluster.ended(
        cluster.submit(
            launch,
            "--ntasks-per-node=2",
            "--gpus-per-node=1",
            "gpu.sbatch",
            program.name,
        )
    )
    assert state == "FAILED"
    assert "fewer GPUs than ranks" in printed


def test_a_script_for_torchrun_has_a_rank_on_each_node_with_all_its_cores(
    cluster, launch
):
    """The script of torchrun's kind needs no PyTorch: it reads what torchrun sets."""
    program = cluster.work / "torchrun.py"
    program.write_text(
        textwrap.dedent("""
        import os
        from mpi4py import MPI

        names = "SLURMD_NODENAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"
        every = MPI.COMM_WORLD.gather(("-".join(os.environ[name] for name in names), len(os.sched_getaffinity(0))))
        if every:
            print("have", *sorted(own for own, _ in every), "cores", *{cores for _, cores in every})
        """)
    )
    cores = min(2, os.cpu_count())
    # the script's own line, with its options
    default = "" if launch.startswith("mpirun") else launch
    state, printed = cluster.ended(
        cluster.submit(
            default, f"--cpus-per-task={cores}", "torch.sbatch", program.name
        )
    )
    assert state == "COMPLETED", printed
    assert f"have n1-0-0-2-{cores} n2-1-0-2-{cores} cores {os.cpu_count()}\n" in printed


def test_a_training_that_is_told_to_stop_continues_bit_for_bit(cluster, launch, whole):
    job = cluster.submit(
        launch, "checkpointed_training.sbatch", "--steps", "150", "--pause", "0.1"
    )
    cluster.until(job, lambda: "a new run" in cluster.printed(job), 180)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.until(job, lambda: cluster.facts(job)["Restarts"] == "1", 180)
    state, printed = cluster.ended(job)
    assert_continued(state, printed, whole(150))
    assert cluster.facts(job)["Restarts"] == "1"


def test_a_training_that_meets_its_time_limit_continues_bit_for_bit(cluster, whole):
    """The first run takes more than its two minutes; then the job is given ten, so that one break is enough."""
    job = cluster.submit(
        *(
            "mpirun -n 4",
            "--time=2",
            "--signal=B:USR1@10",
            "checkpointed_training.sbatch",
        ),
        *("--steps", "300", "--pause", "0.4"),
    )
    cluster.until(job, lambda: cluster.facts(job)["Restarts"] == "1", 180)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    state, printed = cluster.ended(job)
    assert_continued(state, printed, whole(300))


def test_the_benchmark_is_swept_over_densities(cluster, launch):
    arguments = (
        "--array=0,2",
        "bench_sweep.sbatch",
        "--length",
        "100000",
        "--repeats",
        "2",
    )
    job = cluster.submit(launch, *arguments)

    def states():
        return [cluster.facts(f"{job}_{part}")["JobState"] for part in (0, 2)]

    cluster.until(
        job, lambda: not {*states()} & {"PENDING", "RUNNING", "COMPLETING"}, 300
    )
    assert states() == ["COMPLETED", "COMPLETED"], cluster.printed(job)
    for density in ("0.0001", "0.01"):
        rows = json.loads(
            (cluster.work / f"bench_sweep-{job}-{density}.json").read_text()
        )
        assert {row["name"].split()[0] for row in rows["rows"]} == {density}
