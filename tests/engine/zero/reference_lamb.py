"""LAMB written out from its paper, one parameter after the other (You et al. 2020, algorithm 2)."""

import torch


class ReferenceLamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                s = self.state[x]
                s["t"] = s.get("t", 0) + 1
                s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * x.grad
                s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * x.grad**2
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                r = m / (torch.sqrt(v) + group["eps"]) + group["weight_decay"] * x
                top, bottom = torch.linalg.vector_norm(x), torch.linalg.vector_norm(r)
                ratio = float(min(max(top / bottom, 0.01), 10.0)) if top > 0 and bottom > 0 else 1.0
                x -= group["lr"] * ratio * r
