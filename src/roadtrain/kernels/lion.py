"""Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2) as a torch optimizer. torch has no Lion.

Gives the same bits as the compiled rule. Does NOT take sparse or complex parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The Lion optimizer with decoupled weight decay.

        p <- p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: Learning rate.
        betas: Coefficients of the update and of the running average m.
        weight_decay: Decoupled weight decay coefficient.
        maximize: Maximize the objective instead of minimizing it.

    Raises:
        ValueError: `lr` or `weight_decay` is negative, or a beta is outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            got = f"Lion got lr {lr}, betas {betas}, weight_decay {weight_decay}"
            raise ValueError(f"{got}, but lr and weight_decay must be >= 0, and betas in [0, 1)")
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: A function that computes the loss and the gradients before the update.

        Returns:
            The closure's loss, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                sign = (m * beta1 + grad * (1 - beta1)).sign_()
                p.sub_(sign.mul_(group["lr"]))
                m.mul_(beta2).add_(grad * (1 - beta2))
        return loss
