"""A model of how long a step takes, fitted while steps run.

    seconds = a + b * prefill tokens + c * decodes + d * tokens in the KV cache

Least squares in which old steps are forgotten, but only in the direction that a new step says something about
(L. Cao and H. Schwartz, "A directional forgetting algorithm based on the decomposition of the information matrix",
Automatica 36, 2000): minutes of decodes alone do not wear away what is known of prompts.
"""

from __future__ import annotations

FORGET = 0.1  # share of what was known along a step's direction that the step replaces
SCALES = (1.0, 1024.0, 64.0, 65536.0)  # of the four terms, so that their coefficients are of one magnitude
PRIOR_WEIGHT = 1e-3  # of the assumption that a step takes no time, against that of one step
MAX_SURPRISE = 3.0  # a step counts as at most so many times as long as was expected (a pause is not the model's time)
MIN_STEPS = 8  # before which nothing is a surprise
LEAST_SLOPE = 1e-9  # seconds a token: a slope that is not positive says that prompts are free as far as known

Vector = list[float]


class StepTimeModel:
    """Coefficients of one engine's steps. Times are in seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        size = len(SCALES)
        self._coefficients: Vector = [0.0] * size
        self._information = [[PRIOR_WEIGHT * (i == j) for j in range(size)] for i in range(size)]

    def observe(self, seconds: float, num_prefill: int, num_decodes: int, kv_tokens: int) -> None:
        """Learn from one step."""
        terms = _terms(num_prefill, num_decodes, kv_tokens)
        expected = _dot(terms, self._coefficients)
        if self.num_steps >= MIN_STEPS and expected > 0:
            seconds = min(seconds, MAX_SURPRISE * expected)
        self.num_steps += 1
        known = [_dot(row, terms) for row in self._information]
        share = FORGET / _dot(known, terms)  # `terms` holds a 1 and the matrix is positive: never zero
        for i, row in enumerate(self._information):
            for j in range(len(row)):
                row[j] += terms[i] * terms[j] - share * known[i] * known[j]
        gain = _solve(self._information, terms)
        error = seconds - expected
        self._coefficients = [c + g * error for c, g in zip(self._coefficients, gain, strict=True)]

    def predict(self, num_prefill: int, num_decodes: int, kv_tokens: int) -> float:
        """Seconds that such a step takes."""
        return _dot(_terms(num_prefill, num_decodes, kv_tokens), self._coefficients)

    def prefill_within(self, seconds: float, num_decodes: int, kv_tokens: int) -> int:
        """Prefill tokens with which a step takes no more than `seconds`; 0 where it is too long without any."""
        slope = max(LEAST_SLOPE, self._coefficients[1] / SCALES[1])
        return max(0, int((seconds - self.predict(0, num_decodes, kv_tokens)) / slope))


def _terms(num_prefill: int, num_decodes: int, kv_tokens: int) -> Vector:
    return [x / scale for x, scale in zip((1, num_prefill, num_decodes, kv_tokens), SCALES, strict=True)]


def _dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """x with matrix x = right, for a small symmetric positive matrix: Cholesky, L L' x = right."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = max(rest, 1e-30) ** 0.5 if i == j else rest / lower[j][j]
    x = list(right)
    for i in range(size):
        x[i] = (x[i] - sum(lower[i][k] * x[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(size)):
        x[i] = (x[i] - sum(lower[k][i] * x[k] for k in range(i + 1, size))) / lower[i][i]
    return x
