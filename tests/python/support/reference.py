"""The float64 reference of docs/numerics.md in numpy: what every trajectory is judged by."""

import numpy as np

_RAW = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
POLAR_EXPRESS = [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in _RAW]


def newton_schulz(update, steps=5, coefficients=POLAR_EXPRESS):
    """The exact polynomial. `update`: rows x cols."""
    x = np.asarray(update, np.float64)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    largest = np.abs(x).max()
    if largest == 0:
        return np.zeros_like(update, np.float64)
    x = x / largest
    x = x / (np.linalg.norm(x) + 1e-7)
    for k in range(steps):
        a, b, c = coefficients[min(k, len(coefficients) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


SCALES = {
    "match_rms_adamw": lambda out, inn: 0.2 * np.sqrt(max(out, inn)),
    "original": lambda out, inn: np.sqrt(max(1, out / inn)),
    "spectral": lambda out, inn: np.sqrt(out / inn),
    "none": lambda out, inn: 1.0,
}


class Muon:
    """One matrix on the muon route."""

    def __init__(self, weight, lr=0.02, momentum=0.95, weight_decay=0.0, nesterov=True, adjust_lr="match_rms_adamw"):
        self.weight = np.array(weight, np.float64)
        self.momentum = None
        self.lr, self.mu, self.decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.scale = SCALES[adjust_lr](*self.weight.shape)

    def step(self, gradient):
        g = np.asarray(gradient, np.float64)
        self.momentum = g.copy() if self.momentum is None else self.mu * self.momentum + g
        update = g + self.mu * self.momentum if self.nesterov else self.momentum
        self.weight *= 1 - self.lr * self.decay
        self.weight -= self.lr * self.scale * newton_schulz(update)


class AdamW:
    """One tensor on an AdamW route, as PyTorch has it."""

    def __init__(self, weight, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.weight = np.array(weight, np.float64)
        self.m, self.v = np.zeros_like(self.weight), np.zeros_like(self.weight)
        self.lr, self.betas, self.eps, self.decay, self.t = lr, betas, eps, weight_decay, 0

    def step(self, gradient):
        g = np.asarray(gradient, np.float64)
        (b1, b2), self.t = self.betas, self.t + 1
        self.weight *= 1 - self.lr * self.decay
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        denominator = np.sqrt(self.v / (1 - b2**self.t)) + self.eps
        self.weight -= self.lr * (self.m / (1 - b1**self.t)) / denominator


def relative(given, exact):
    """Relative Frobenius error."""
    given, exact = np.asarray(given, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(given - exact) / np.linalg.norm(exact))
