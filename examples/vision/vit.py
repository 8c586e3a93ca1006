"""Train a small vision transformer on scikit-learn's digits; its state stays in files."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import roadtrain

EPOCHS, BATCH, WIDTH = 3, 32, 64


class ViT(nn.Module):
    """Classify 8 x 8 images: each 2 x 2 patch is a token."""

    def __init__(self, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(16 * WIDTH, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (batch, 16, width)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 0.5  # (1797, 1, 8, 8)
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:-360], order[-360:]

model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# The layers of the ModuleList become the blocks; patches, positions and head stay in memory.
optimizer = roadtrain.place(model, optimizer, store="runs/vision", host_budget="64MiB")

for epoch in range(EPOCHS):
    model.train()
    total = 0.0
    batches = train[torch.randperm(len(train))].split(BATCH)
    for rows in batches:
        loss = cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"epoch {epoch + 1}, loss {total / len(batches):.3f}, accuracy {accuracy:.3f}")

optimizer.close()  # commits the last step
