import torch

torch.set_num_threads(1)  # tiny models: a second thread only spins, and the tests run on all cores as it is
