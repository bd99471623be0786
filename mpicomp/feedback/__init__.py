"""Error feedback: the residual of a rank. One file a method; `base` declares the contract.

docs/feedback.md compares the methods.
"""

from mpicomp.feedback.base import Feedback
from mpicomp.feedback.error_feedback import ErrorFeedback, InPlaceErrorFeedback
from mpicomp.feedback.momentum_correction import MomentumCorrection
from mpicomp.feedback.none import NoFeedback
from mpicomp.feedback.step_ahead import StepAhead

__all__ = [
    "ErrorFeedback",
    "Feedback",
    "InPlaceErrorFeedback",
    "MomentumCorrection",
    "NoFeedback",
    "StepAhead",
]
