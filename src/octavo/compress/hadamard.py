"""Hadamard matrices: square, of +1 and -1, with orthogonal rows; orthogonal ones that stand in where none is at hand.

Sylvester (1867) doubles an order. Paley ("On orthogonal matrices", 1933) makes one of order q + 1 from the squares of
a field with q = 3 (mod 4) elements, and of order 2 (q + 1) where q = 1 (mod 4). Williamson (1944) combines four
symmetric circulants; it gives 92, the first order that neither of the others reaches. Together they reach all hidden
and intermediate sizes of the common models, often through a larger core: 11008 is 344 * 32, and 343 = 7 * 7 * 7.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.layers.rotation import Rotation, power_of_two_part, sylvester

_CORE = 8192  # the largest matrix that is made as one
# First rows of the four circulants of order 23, found by search over their power spectra, which sum to 4 * 23.
_WILLIAMSON = {23: ("+-----++-+-+", "+++++----+-+", "++-+--+++--+", "++-+-+++-++-")}


def rotation_of(size: int, kind: str, seed: int, block: int | None = None) -> tuple[Rotation, str | None]:
    """An orthogonal matrix of this order, and what to say where it is another than was asked for.

    kind: "hadamard", "random-hadamard" (each input's sign drawn by `seed` before) or "random-matrix" (a random
    orthogonal matrix). block: the order of blocks along the diagonal instead of one matrix; it must divide `size`.
    Where no Hadamard matrix of the order is at hand, a random orthogonal matrix does the same service.
    """
    order = block or size
    generator = torch.Generator().manual_seed(seed)
    if kind == "random-matrix":
        return Rotation(size, (random_orthogonal(order, generator),)), None
    factors = hadamard_factors(order)
    if factors is None:
        note = f"no Hadamard matrix of order {order} is at hand: a random orthogonal matrix (seed {seed}) is used"
        return Rotation(size, (random_orthogonal(order, generator),)), note
    signs = None
    if kind == "random-hadamard":
        signs = torch.randint(0, 2, (size,), generator=generator).to(torch.float64) * 2 - 1
    return Rotation(size, factors, signs), None


def random_orthogonal(order: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal float64 matrix, all of them equally likely (Stewart, 1980)."""
    triangle = torch.randn(order, order, dtype=torch.float64, generator=generator)
    orthogonal, upper = torch.linalg.qr(triangle)
    return orthogonal * upper.diagonal().sign()


@cache
def hadamard_factors(order: int) -> tuple[Tensor, ...] | None:
    """Kronecker factors of a Hadamard matrix of this order, scaled to be orthogonal; None where none is at hand.

    The matrix with the smallest core is taken, for the rest is applied fastest.
    """
    power = power_of_two_part(order)
    if power == order:
        return sylvester(order)
    core = order // power
    while core <= min(order, _CORE):
        matrix = hadamard_core(core)
        if matrix is not None:
            return (matrix / core**0.5, *sylvester(order // core))
        core *= 2
    return None


def hadamard_core(order: int) -> Tensor | None:
    """A Hadamard matrix (float64, +1 and -1) by Paley or Williamson; None for an order that they do not give."""
    if order % 4:
        return None
    first, second = _prime_power(order - 1), _prime_power(order // 2 - 1)
    if first is not None:  # order - 1 is 3 (mod 4)
        return _bordered(*first, -1.0) + torch.eye(order, dtype=torch.float64)
    if second is not None and (order // 2 - 1) % 4 == 1:
        conference = _bordered(*second, 1.0)
        sums = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        differences = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        unit = torch.eye(len(conference), dtype=torch.float64)
        return torch.kron(conference, sums) + torch.kron(unit, differences)
    return _williamson(_WILLIAMSON[order // 4]) if order // 4 in _WILLIAMSON else None


def _bordered(prime: int, degree: int, corner: float) -> Tensor:
    """[q + 1, q + 1]: the quadratic characters of all differences in the field of q = prime^degree elements, with a
    border of ones, which has the sign `corner` at the left; zero on the diagonal."""
    digits = _elements(prime, degree)
    weights = prime ** torch.arange(degree)
    squares = _square(digits, prime) @ weights
    character = -torch.ones(len(digits), dtype=torch.float64)
    character[squares] = 1.0
    character[0] = 0.0
    difference = (digits[:, None] - digits[None]) % prime @ weights
    matrix = torch.zeros(len(digits) + 1, len(digits) + 1, dtype=torch.float64)
    matrix[1:, 1:] = character[difference]
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    return matrix


def _elements(prime: int, degree: int) -> Tensor:
    """All polynomials of less than `degree` over the prime field: int64 [prime^degree, degree], lowest power first."""
    return torch.arange(prime**degree)[:, None] // prime ** torch.arange(degree) % prime


def _square(digits: Tensor, prime: int) -> Tensor:
    """The squares of field elements [q, degree], reduced by an irreducible polynomial."""
    degree = digits.shape[1]
    product = torch.zeros(len(digits), 2 * degree - 1, dtype=torch.int64)
    for power in range(degree):
        product[:, power : power + degree] += digits[:, power, None] * digits
    modulus = _irreducible(prime, degree)
    for power in range(2 * degree - 2, degree - 1, -1):
        product[:, power - degree : power] -= product[:, power, None] * modulus
        product %= prime
    return product[:, :degree] % prime


def _irreducible(prime: int, degree: int) -> Tensor:
    """Coefficients [degree] below the leading 1 of a polynomial without roots: up to degree 3 it has no factors."""
    values = torch.arange(prime)
    powers = values[:, None] ** torch.arange(degree)
    for candidate in _elements(prime, degree):
        if degree == 1 or bool(((values**degree + powers @ candidate) % prime != 0).all()):
            return candidate
    raise AssertionError("there is an irreducible polynomial of every degree")


def _prime_power(number: int) -> tuple[int, int] | None:
    """The odd prime and the exponent (at most 3) of a prime power."""
    for exponent in (1, 2, 3):
        root = round(number ** (1 / exponent))
        if root > 2 and root**exponent == number and all(root % divisor for divisor in range(2, int(root**0.5) + 1)):
            return root, exponent
    return None


def _williamson(rows: tuple[str, ...]) -> Tensor:
    """From the halves of the symmetric circulants' first rows, "+" for 1."""
    blocks = []
    for row in rows:
        half = torch.tensor([1.0 if sign == "+" else -1.0 for sign in row], dtype=torch.float64)
        first = torch.cat([half, half[1:].flip(0)])
        blocks.append(torch.stack([first.roll(shift) for shift in range(len(first))]))
    a, b, c, d = blocks
    lines = [[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]]
    return torch.cat([torch.cat(line, dim=1) for line in lines])
