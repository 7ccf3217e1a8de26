"""The small language model that ships with Mico, so that `mico up` answers without a download.

Does not import torch: a site loads FOLDER as it would any other model folder.
"""

from pathlib import Path

NAME = "mico-demo"
FOLDER = Path(__file__).parent / "weights"
