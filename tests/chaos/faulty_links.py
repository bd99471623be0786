"""Run every collective over links with faults:  sudo python tests/chaos/faulty_links.py [--ranks 4] [--runs 1]

On hosts of benchmarks/testbed: first over clean links, then over links that lose,
double, hold back or delay frames, and that do all of it at once. The results of each
rank, float32 from seeds, are to have the same bits as over the clean links, and the
faults are to have happened, as counted while the ranks ran. A row has what was counted
on all links, the seconds of the ranks, and the operations with other bits. The exit
status is 1 when one had, or when a fault that was asked for did not happen.
"""

import hashlib
import json
import pathlib
import sys
import tempfile
import time
from functools import partial

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from hosts import on_hosts, refusal
from jobs import parser

LENGTH, STEPS = 50_000, 3
PATIENCE = 300  # seconds for the ranks, over the worst links
ALL = "--loss 1% --duplicate 1% --reorder 5% --delay 2ms --jitter 1ms"
CASES = {  # the faults, and the counts that show them
    "loss": ("--loss 1%", ["dropped"]),
    "duplication": ("--duplicate 1%", ["doubled"]),
    "reordering": ("--reorder 5%", ["reordered"]),
    "delay": ("--delay 2ms --jitter 1ms", ["delayed"]),
    "all of it": (ALL, ["dropped", "doubled", "reordered", "delayed"]),
}
COUNTS = "frames", "dropped", "doubled", "reordered", "delayed", "overflowed"


def script(name, *arguments, timeout=60):
    """Run the script of the testbed and return what it printed; RuntimeError when it failed."""
    status, said = on_hosts(*arguments, name=name, timeout=timeout)
    if status:
        raise RuntimeError(f"{' '.join(arguments)}: {said}")
    return said


def run(faults, ranks, rate, *, seed=1, length=LENGTH, name="links"):
    """Run all operations over links with these faults.

    Returns the digests of each rank's results, by operation; the counts of each link;
    and the seconds of the ranks.
    """
    script(
        name,
        "up",
        str(ranks),
        rate,
        *([*faults.split(), "--seed", str(seed), "--relay"] if faults else []),
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            worker = [
                sys.executable,
                "-m",
                "mpi4py",
                __file__,
                "--worker",
                folder,
                str(length),
            ]
            began = time.monotonic()
            script(
                name, "run", "timeout", str(PATIENCE), *worker, timeout=PATIENCE + 30
            )
            took = time.monotonic() - began
            digests = [
                json.loads(pathlib.Path(folder, f"{rank}.json").read_text())
                for rank in range(ranks)
            ]
        return (
            digests,
            json.loads(script(name, "faults", "--json")) if faults else [],
            took,
        )
    finally:
        script(name, "down")


def differences(clean, faulty):
    """Return the operations whose results have other bits, or are missing, on any rank."""
    pairs = list(zip(clean, faulty, strict=True))
    names = dict.fromkeys(name for rank in (*clean, *faulty) for name in rank)
    return [
        name
        for name in names
        if any(one.get(name) != other.get(name) for one, other in pairs)
    ]


def absent(counts, expected):
    """Return the faults that were asked for and happened on no link."""
    return [name for name in expected if not sum(link[name] for link in counts)]


def gradient(rank, step, length):
    """Return what a rank contributes: float32 values, whose sums depend on the order of the additions."""
    return np.random.default_rng([rank, step]).standard_t(3, length).astype(np.float32)


def operations(comm, length):
    """Return each collective in each of its ways, by name: what it is called, and its keyword arguments."""
    from collectives import allreduce, gtopk_allreduce
    from mpicomp import TopK

    ways = {
        "sparse_allreduce": [
            {"algorithm": name} for name in ("auto", *allreduce.ALGORITHMS)
        ],
        "sparse_reduce_scatter": [{}],
        "sparse_allgather": [{}],
        "gtopk_allreduce": [
            {"k": length // 200, "algorithm": name}
            for name in gtopk_allreduce.algorithms
        ],
        "compressed_allreduce": [{"compressor": TopK(density=0.005)}],
        "sparse_reduce": [{"root": comm.size - 1}],
        "sparse_bcast": [{"root": comm.size - 1}],
        "dense_allreduce": [{}],
    }
    ways["sparse_allreduce"] += [
        {"codec": name} for name in ("plain", "quick", "smallest")
    ] + [{"votes": True}]
    return {
        f"{name} {terms}": (name, terms)
        for name, each in ways.items()
        for terms in each
    }


def results(comm, length):
    """Yield the name and the result of every operation: one after the other, all in flight at once, and exchanges."""
    import collectives
    from mpicomp import TopK

    mine = gradient(comm.rank, 0, length)
    vector = TopK(density=0.01).compress(mine)
    contribution = {"dense_allreduce": mine}
    every = operations(comm, length)
    for label, (name, terms) in every.items():
        yield (
            label,
            getattr(collectives, name)(contribution.get(name, vector), comm, **terms),
        )
    in_flight = {
        label: getattr(collectives, name.replace("_", "_i", 1))(
            contribution.get(name, vector), comm, **terms
        )
        for label, (name, terms) in every.items()
    }
    # another order on each rank
    for place in np.random.default_rng(comm.rank).permutation(len(every)):
        in_flight[list(every)[place]].wait()
    for label, request in in_flight.items():
        yield f"{label}, in flight", request.wait()
    plan = collectives.SupportPlan.union(vector, comm)
    yield f"{plan}", plan.allreduce(plan.take(mine))
    yield from exchanged(comm, length)


def exchanged(comm, length):
    """Yield the means of some steps with error feedback, by two codecs and with quantised values, and the residuals."""
    from collectives import GradientExchange, gtopk_allreduce, sparse_iallreduce
    from mpicomp import ErrorFeedback, Quantised, TopK

    for label, compressor, collective in (
        ("gtopk, plain", TopK(0.01), partial(gtopk_allreduce, codec="plain")),
        ("gtopk, smallest", TopK(0.01), partial(gtopk_allreduce, codec="smallest")),
        (
            "sum, float16, smallest",
            Quantised(TopK(0.01), "float16"),
            partial(sparse_iallreduce, codec="smallest"),
        ),
    ):
        exchange = GradientExchange(comm, compressor, ErrorFeedback(), collective)
        for step in range(STEPS):
            yield (
                f"exchange {label}, step {step}",
                exchange(gradient(comm.rank, step, length)),
            )
        yield f"exchange {label}, residual", exchange.feedback.residual
    exchange = GradientExchange(comm, TopK(0.01), ErrorFeedback(), sparse_iallreduce)
    for step in range(STEPS):
        whole = gradient(comm.rank, step, length)
        means = exchange({"weight": whole[100:], "bias": whole[:100]})
        yield (
            f"exchange of named tensors, step {step}",
            [means["weight"], means["bias"]],
        )


def digest(result):
    """Return a digest of all bits of a result: of vectors, arrays and lists of them, or None."""
    if hasattr(result, "indices"):
        result = [result.indices, result.values, np.array(result.length)]
    if isinstance(result, (list, tuple)):
        return hashlib.sha256(
            "".join(digest(each) for each in result).encode()
        ).hexdigest()
    bits = b"" if result is None else result.tobytes()
    return hashlib.sha256(
        str((getattr(result, "dtype", None), np.shape(result))).encode() + bits
    ).hexdigest()


def work(folder, length):
    """Write the digests of this rank's results."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    mine = {name: digest(result) for name, result in results(comm, int(length))}
    pathlib.Path(folder, f"{comm.rank}.json").write_text(json.dumps(mine))


def main():
    asked = parser(
        __doc__, ranks=4, rate="100mbit", length=LENGTH, seed=1, runs=1, name="links"
    ).parse_args()
    if asked.worker:
        work(*asked.worker)
        return 0
    if reason := refusal("--relay"):
        sys.exit(reason)
    over = {name: getattr(asked, name) for name in ("ranks", "rate", "length", "name")}
    clean, _, took = run("", **over)
    print(
        f"{'links':<12}"
        + "".join(f"{name:>12}" for name in COUNTS)
        + "     seconds  other bits"
    )
    print(
        f"{'clean':<12}"
        + f"{'-':>12}" * len(COUNTS)
        + f"{took:>12.1f}  {len(clean[0])} operations",
        flush=True,
    )
    failed = False
    for seed in range(asked.seed, asked.seed + asked.runs):
        for case, (faults, expected) in CASES.items():
            failed |= faulty(case, clean, expected, run(faults, seed=seed, **over))
    return int(failed)


def faulty(case, clean, expected, ran):
    """Print the row of a case, and return whether it failed."""
    digests, counts, took = ran
    other, missing = differences(clean, digests), absent(counts, expected)
    sums = "".join(f"{sum(link[name] for link in counts):>12,}" for name in COUNTS)
    print(f"{case:<12}{sums}{took:>12.1f}  {', '.join(other) or 'none'}", flush=True)
    if missing:
        print(f"{'':<12}did not happen: {', '.join(missing)}", flush=True)
    return bool(other or missing)


if __name__ == "__main__":
    sys.exit(main())
