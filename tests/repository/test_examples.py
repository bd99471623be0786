"""The examples run on 2 ranks, check themselves, and leave the plot where they say."""

import re
import signal
import sys

import pytest
from jobs import ROOT, mpirun, python


def run(size, example, *arguments, cwd):
    return mpirun(size, ROOT / "examples" / example, *arguments, cwd=cwd)


@pytest.mark.slow  # make demo runs it, with all of its claims
def test_numpy_digits(tmp_path):
    pytest.importorskip("sklearn")
    done = run(
        3, "numpy_digits.py", "--steps", "12", "--plot", "here.png", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 5
    assert "plot: here.png" in done.stdout
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_step_ahead():
    done = python(ROOT / "examples" / "step_ahead.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 4


def checked(example, *arguments, size=2, cwd, checks):
    """Run an example, and return what it printed once as many checks hold as expected, and no other."""
    done = run(size, example, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout.count("check: "), done.stdout.count(": ok")) == (
        checks,
        checks,
    ), done.stdout
    return done.stdout


ONE_BY_ONE = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


def test_weight_patches(tmp_path):
    printed = checked("weight_patches.py", size=3, cwd=tmp_path, checks=4)
    assert "3.1% of weights change" in printed


def test_the_files_to_read_have_the_bits_of_the_library(tmp_path):
    """In one job: ranks take longer to start than these files run."""
    paths = [
        ROOT / "examples" / "simple" / f"{name}.py"
        for name in ("exchange", "gtopk", "few_bits")
    ]
    done = mpirun(4, "-c", ONE_BY_ONE, *paths, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("check: ") == done.stdout.count(": ok") == 3, done.stdout


def test_torch_in_ddp_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
    pytest.importorskip("sklearn")
    checked("torch_ddp.py", "--steps", "60", cwd=tmp_path, checks=3)


def test_torch_with_steps_by_signs(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
    pytest.importorskip("sklearn")
    checked("torch_signs.py", cwd=tmp_path, checks=4)


def test_torch_with_local_steps(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
    pytest.importorskip("sklearn")
    printed = checked("torch_local_steps.py", cwd=tmp_path, checks=4)
    assert "dense AdamW: step 50 of 200" in printed
    assert "local steps of Muon: step 200 of 200" in printed


def test_torch_with_ddp_or_fsdp_inside_a_node(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
    checked("torch_nodes.py", size=4, cwd=tmp_path, checks=4)


def test_torch_without_ddp(tmp_path):
    """With unused parameters, uneven batches, and both."""
    pytest.importorskip("torch", reason="needs PyTorch: make test-torch")
    pytest.importorskip("sklearn")
    printed = checked("torch_manual.py", "--steps", "20", cwd=tmp_path, checks=12)
    # the cases are no copies of each other
    assert len(set(re.findall(r"parameters ([0-9a-f]{16}),", printed))) == 4


def test_jax(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("sklearn")
    checked("jax_digits.py", "--steps", "30", cwd=tmp_path, checks=3)


@pytest.mark.slow
def test_jax_with_local_steps(tmp_path):
    pytest.importorskip("optax", reason="needs JAX and optax: make test-torch")
    checked("jax_local_steps.py", cwd=tmp_path, checks=2)


@pytest.mark.slow
def test_sharded_optimizer(tmp_path):
    checked("sharded_optimizer.py", "--steps", "40", size=3, cwd=tmp_path, checks=5)


@pytest.mark.slow
def test_embedding_rows(tmp_path):
    checked("embedding_rows.py", "--steps", "60", cwd=tmp_path, checks=4)


@pytest.mark.slow
def test_sparse_features(tmp_path):
    checked(
        "sparse_features.py",
        "--steps",
        "40",
        "--dense",
        "2",
        "--blocks",
        "20",
        cwd=tmp_path,
        checks=4,
    )


@pytest.mark.slow
def test_sparse_histogram(tmp_path):
    checked(
        "sparse_histogram.py",
        "--files",
        "12",
        "--k",
        "50",
        size=3,
        cwd=tmp_path,
        checks=4,
    )


@pytest.mark.slow
def test_local_steps(tmp_path):
    pytest.importorskip("sklearn")
    checked("local_steps.py", cwd=tmp_path, checks=4)


def test_an_example_that_has_not_learnt_ends_with_status_1(tmp_path):
    done = run(1, "embedding_rows.py", "--steps", "0", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"it learns.*: FAILED", done.stdout)
    assert done.stdout.count("FAILED") == 1


EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if "__main__" in path.read_text()  # and no module beside one
]
WITHOUT = """
import runpy, sys
for name in "jax", "scipy", "sklearn", "torch":
    sys.modules[name] = None  # importing it raises ImportError
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(path, end.code)
"""


def test_an_example_names_what_is_not_installed_in_a_line():
    """Its text is what Python prints to stderr, before it ends with 1."""
    paths = [path for path in EXAMPLES if "except ImportError" in path.read_text()]
    done = python("-c", WITHOUT, *paths)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [str(path) for path in paths]
    for line in lines:
        assert re.search(
            r"(jax|scipy|sklearn|torch).*: pip install '\.\[.*examples\]'", line
        )


def test_the_muon_of_the_examples_has_thirty_lines():
    """Without those that are blank or text."""
    code = (ROOT / "examples" / "muon.py").read_text()
    code = code[code.index("class Muon(") : code.index("def has_bfloat16(")].rstrip()
    lines = [line for line in code.splitlines() if line.strip(" \n")]
    assert len([line for line in lines if '"""' not in line]) <= 30


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_opens_with_its_run_line_and_stands_in_the_readme(path):
    words, blank, line, *_ = path.read_text().split("\n")
    assert words.startswith('"""')
    assert blank == ""
    launched = (
        "mpirun -n [2-4] (python -m mpi4py|--bind-to none python -m collectives.torch)"
    )
    assert re.fullmatch(rf" {{4}}({launched}|python) examples/{path.name}", line)
    assert f"`{path.name}`" in (ROOT / "README.md").read_text()


def digest(printed):
    """Return the digest of the parameters at the end of a training."""
    (line,) = [line for line in printed.splitlines() if "parameters" in line]
    return line.split()[-1]


def train(*arguments, cwd, size=2):
    done = run(size, "checkpointed_training.py", "--steps", "12", *arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_training_continues_bit_for_bit(tmp_path):
    whole = train("--folder", "whole", cwd=tmp_path)
    assert whole[0] == 0, whole
    status, printed, _ = train("--stop-after", "5", cwd=tmp_path)
    assert (status, printed.splitlines()[-1]) == (75, "step 5: saved, to be continued")
    # What a job that dies in a save leaves behind: files of a later step, not renamed.
    # They are not looked at.
    partial = tmp_path / "checkpoints" / "partial"
    partial.mkdir()
    (partial / "rank-0-of-2.npz").write_bytes(b"half a fi")
    continued = train("--every", "4", cwd=tmp_path)
    assert continued[0] == 0, continued
    assert "step 5: taken up from checkpoints/step-00000005" in continued[1]
    assert continued[1].count("check: ") == continued[1].count(": ok") == 2
    assert digest(continued[1]) == digest(whole[1])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000012",
    ]


@pytest.mark.slow
def test_a_training_continues_on_another_number_of_ranks(tmp_path):
    """It compares the residuals with those that were saved, and raises where some are missing."""
    assert train("--stop-after", "5", cwd=tmp_path, size=4)[0] == 75
    status, printed, _ = train(cwd=tmp_path, size=3)
    assert status == 0
    assert "numbers of ranks so far: [4, 3]" in printed
    assert printed.count("check: ") == printed.count(": ok") == 1


@pytest.mark.slow
def test_a_training_does_not_continue_what_is_another_one(tmp_path):
    assert train("--stop-after", "5", cwd=tmp_path, size=1)[0] == 75
    status, printed, _ = train("--steps", "4", cwd=tmp_path, size=1)
    assert (status, "that is beyond --steps 4" in printed) == (2, True)
    assert (
        "trained with --seed 0: expected 1"
        in train("--seed", "1", cwd=tmp_path, size=1)[2]
    )


@pytest.mark.slow
def test_what_ranks_saved_when_one_was_lost_is_a_whole_step_and_continues(tmp_path):
    done = run(2, "save_on_failure.py", "--stop", "1", cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(
        "rank 0 saved step 10: .*; rank 1 did not respond within 1", done.stdout
    )
    # it may have saved when the launcher ended it
    (tmp_path / "saved" / "rank-1.npz").unlink(missing_ok=True)
    checked("save_on_failure.py", cwd=tmp_path, checks=3)


def test_saving_on_sigterm_and_on_nothing_else(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from save_on_failure import saving

    saved = []
    with saving(saved.append):
        pass
    with pytest.raises(KeyError), saving(saved.append):
        raise KeyError("another one's")
    with pytest.raises(SystemExit), saving(saved.append):
        sys.exit(1)
    assert not saved
    with pytest.raises(SystemExit) as caught, saving(saved.append):
        signal.raise_signal(signal.SIGTERM)
    assert (caught.value.code, saved) == (143, [caught.value])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
