"""What can go wrong in the predictor.

PredictorError
├── ArtifactError      an artifact is missing, damaged or of another version
├── DataError          a data set lacks what training or evaluation needs
└── RefusedUpdate      a new model was not better, the old one stays
"""


class PredictorError(Exception):
    """Carries a reason that a person can act on."""


class ArtifactError(PredictorError):
    """An artifact cannot be served."""


class DataError(PredictorError):
    """A data set cannot be learned from."""


class RefusedUpdate(PredictorError):
    """The candidate did not earn its place."""
