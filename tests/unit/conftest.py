import torch
from hypothesis import settings

torch.set_num_threads(1)  # tiny models: a second thread only spins, and the tests run on all cores as it is
settings.register_profile("shared", deadline=None)  # how long an example takes is up to whatever else runs here
settings.load_profile("shared")
