"""Errors of the predictor.

PredictorError
├── ArtifactError      an artifact is missing, damaged or of another version
├── DataError          a data set lacks what training or evaluation needs
└── RefusedUpdate      an updated model is not better, the current one stays in force
"""


class PredictorError(Exception):
    """Base class of the predictor's errors. The message states a reason that a user can act on."""


class ArtifactError(PredictorError):
    """Raised when an artifact cannot be read, written or served."""


class DataError(PredictorError):
    """Raised when a data set cannot be used for training or evaluation."""


class RefusedUpdate(PredictorError):
    """Raised when the updated model is not better than the one in force."""
