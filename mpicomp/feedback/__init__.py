"""Error feedback: the residual of a rank. One file a method; `base` declares the contract.

docs/feedback.md compares the methods. `mpicomp` exports the names in `__all__`; the
others are for those who write a feedback.
"""

from mpicomp.feedback.base import Feedback
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.feedback.error_feedback import (
    InPlaceErrorFeedback as InPlaceErrorFeedback,
)
from mpicomp.feedback.momentum_correction import MomentumCorrection
from mpicomp.feedback.none import NoFeedback
from mpicomp.feedback.step_ahead import StepAhead

__all__ = [
    "ErrorFeedback",
    "Feedback",
    "MomentumCorrection",
    "NoFeedback",
    "StepAhead",
]
