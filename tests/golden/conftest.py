import torch

torch.set_num_threads(
    1
)  # tiny models: a second thread only spins, and sums inside torch depend on their number
