"""Compare step-ahead with plain error feedback on least squares, where the ranks have different solutions.

    python examples/step_ahead.py

Eight ranks are simulated in this process, through the objects that `GradientExchange`
would use; no MPI. Each holds 50 equations in 200 unknowns, with a solution of its own,
and 4 of 200 entries are sent. Two settings:

* minibatches, and each rank compresses its share of the sum again (two-way): error
  feedback has the highest loss, step-ahead a lower one, and step-ahead with the
  residuals averaged every 20 steps the lowest;
* full gradients, one way: plain error feedback is better than step-ahead.

It prints the loss above the minimum, the mean of the last 200 of 1500 steps, and
reference figures. These are the project's own, not the paper's, and their data are not
known. Seed 4 is within 15 % of all five, seeds 0 to 3 within 40 %, in the same order.
It checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import sys

import numpy as np

from mpicomp import MomentumCorrection, SparseVector, StepAhead, TopK

RANKS, ROWS, LENGTH, K = 8, 50, 200, 4
RATE, MOMENTUM, BATCH, SPREAD = 0.0017, 0.9, 4, 0.262
LAST = 200


class Problem:
    """f(x) = mean over ranks and rows of (A_i x - b_i)^2 / 2 with b_i = A_i x_i, and x_i common to half of its size."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.a = rng.standard_normal((RANKS, ROWS, LENGTH))
        solutions = SPREAD * (
            rng.standard_normal(LENGTH) + rng.standard_normal((RANKS, LENGTH))
        )
        self.b = np.einsum("rmn,rn->rm", self.a, solutions)
        best = np.linalg.lstsq(
            self.a.reshape(-1, LENGTH), self.b.reshape(-1), rcond=None
        )[0]
        self.least = self.loss(best)

    def loss(self, x):
        """Return f(x)."""
        return float(np.mean((self.a @ x - self.b) ** 2) / 2)

    def gradients(self, points, rng, batch):
        """Return the gradient of every rank at its own point, from `batch` of its rows, or from all for None."""
        a, b = self.a, self.b
        if batch is not None:
            ranks, rows = (
                np.arange(RANKS)[:, None],
                rng.integers(0, ROWS, (RANKS, batch)),
            )
            a, b = a[ranks, rows], b[ranks, rows]
        return (
            np.einsum("rmn,rm->rn", a, np.einsum("rmn,rn->rm", a, points) - b)
            / a.shape[1]
        )


class ErrorFeedbackWithMomentum(MomentumCorrection):
    """Error feedback of the velocity: momentum correction without masking, which returns a gradient."""

    def __init__(self):
        super().__init__(MOMENTUM, masking=False)

    def ahead(self, x):
        return x


def train(problem, method, steps, *, two_way, batch, seed, period=None):
    """Return the mean excess loss of the last steps, and the error of the virtual iterate."""
    rng, x = np.random.default_rng([seed, 1]), np.zeros(LENGTH)
    ranks = [method() for _ in range(RANKS)]
    virtual, velocity, excess = x.copy(), np.zeros(LENGTH), []
    for step in range(steps):
        gradients = problem.gradients(
            np.array([rank.ahead(x) for rank in ranks]), rng, batch
        )
        vectors = [
            compressed(rank, gradient, place, two_way)
            for place, (rank, gradient) in enumerate(zip(ranks, gradients, strict=True))
        ]
        total = np.zeros(LENGTH)
        for _, sent in vectors:
            total[sent.indices] += sent.values
        kept = TopK(k=K).compress(total).to_dense() if two_way else total
        for place, rank in enumerate(ranks):
            rejected = np.zeros(LENGTH)
            rejected[share(place)] = (total - kept)[share(place)]
            keep = rank.prepare_residual(
                *vectors[place], SparseVector.from_dense(rejected)
            )
            keep()
        if period and (step + 1) % period == 0:
            average_residuals(ranks)
        x = x - unit(ranks) * kept / RANKS
        velocity = MOMENTUM * velocity + gradients.mean(axis=0)
        virtual -= RATE * velocity
        if step >= steps - LAST:
            excess.append(problem.loss(x) - problem.least)
    return float(np.mean(excess)), float(np.abs(x - unsent(ranks) - virtual).max())


def share(rank):
    """Return the share of the sum that a rank owns."""
    return slice(LENGTH * rank // RANKS, LENGTH * (rank + 1) // RANKS)


def compressed(feedback, gradient, rank, two_way):
    """Return what may be sent, and what is sent; with `two_way` all of a rank's own share, and K entries outside."""
    correction = feedback.correct(gradient)
    corrected = correction.add()
    outside = corrected.copy()
    if two_way:
        outside[share(rank)] = 0
    sent = TopK(k=K).compress(outside).to_dense()
    if two_way:
        sent[share(rank)] = corrected[share(rank)]
    return correction, SparseVector.from_dense(sent)


def average_residuals(ranks):
    """Replace every residual by their mean, as collectives.average_residuals does."""
    mean = sum(rank.residual for rank in ranks) / RANKS
    for rank in ranks:
        rank.load_state_dict(rank.state_dict() | {"residual": mean})


def unit(ranks):
    """Return the factor from a mean to an update of the model: step-ahead sends updates, the other gradients."""
    return 1 if isinstance(ranks[0], StepAhead) else RATE


def unsent(ranks):
    """Return the part of the model's update that the residuals of the ranks hold."""
    return unit(ranks) * sum(rank.residual for rank in ranks) / RANKS


# method, two-way and minibatches or not, steps from one averaging to the next, the
# reference figure
RUNS = {
    "two-way, minibatches: error feedback": (
        ErrorFeedbackWithMomentum,
        True,
        None,
        0.311,
    ),
    "two-way, minibatches: step-ahead": (
        lambda: StepAhead(RATE, MOMENTUM),
        True,
        None,
        0.178,
    ),
    "two-way, minibatches: step-ahead, averaging": (
        lambda: StepAhead(RATE, MOMENTUM),
        True,
        20,
        0.130,
    ),
    "one way, full gradients: error feedback": (
        ErrorFeedbackWithMomentum,
        False,
        None,
        0.064,
    ),
    "one way, full gradients: step-ahead": (
        lambda: StepAhead(RATE, MOMENTUM),
        False,
        None,
        0.191,
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"got --steps {options.steps}: expected at least 1")
    problem, found, drift = Problem(options.seed), [], 0.0
    print(f"{'above the least loss':45} here  reference")
    for name, (method, harder, period, reference) in RUNS.items():
        settings = {
            "two_way": harder,
            "batch": BATCH if harder else None,
            "seed": options.seed,
        }
        settings["period"] = period
        excess, off = train(problem, method, options.steps, **settings)
        found.append(excess)
        drift = max(drift, off)
        print(f"{name:45} {excess:.3f}  {reference:.3f}", flush=True)
    checks = {
        "two-way with minibatches step-ahead is better than error feedback": found[0]
        > found[1],
        "and better still with averaging": found[1] > found[2],
        "one way with full gradients error feedback is better": found[3] < found[4],
        f"nothing is lost: the model and the residuals differ from momentum SGD by {drift:.1e}": drift
        < 1e-12,
    }
    for claim, holds in checks.items():
        print(f"{claim}: {'ok' if holds else 'FAILED'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
