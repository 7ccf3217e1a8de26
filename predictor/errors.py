"""Errors of the predictor.

PredictorError
├── ArtifactError      an artifact is missing, damaged or of another version
├── DataError          a data set lacks what training or evaluation needs
└── RefusedUpdate      a new model was not better, the old one stays
"""


class PredictorError(Exception):
    """Base of the predictor's errors; the message is a reason that a person can act on."""


class ArtifactError(PredictorError):
    """An artifact cannot be served."""


class DataError(PredictorError):
    """A data set cannot be used for training or evaluation."""


class RefusedUpdate(PredictorError):
    """The updated model is not better than the one in force."""
