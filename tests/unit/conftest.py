import torch
from hypothesis import settings

# tiny models: a second thread only spins, and the tests run on all cores as it is
torch.set_num_threads(1)
# how long an example takes is up to whatever else runs here
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
