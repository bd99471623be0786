"""Error feedback: what a rank keeps of its gradient until it travels. One file a method, one small protocol.

docs/feedback.md compares the methods. What they share is in `common`.
"""

from mpicomp.feedback.ef21 import EF21
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.feedback.momentum_correction import MomentumCorrection
from mpicomp.feedback.none import NoFeedback
from mpicomp.feedback.protocol import Feedback
from mpicomp.feedback.step_ahead import StepAhead
from mpicomp.feedback.two_way import TwoWay

__all__ = ["EF21", "ErrorFeedback", "Feedback", "MomentumCorrection", "NoFeedback", "StepAhead", "TwoWay"]
