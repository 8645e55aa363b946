"""The functions that python tasks ask about: the expert sends their source, and the ground truth is their result.

Each takes a and b, whole numbers, and gives a number of more digits than b has.
"""

import math


def prime_sum(a: int, b: int) -> int:
    return sum(n for n in range(a, a + b + 1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def power_digits(a: int, b: int) -> int:
    return sum(map(int, str(a**b)))


def reversed_sum(a: int, b: int) -> int:
    return sum(int(str(n)[::-1]) for n in range(a, a + b + 1))


def seven_positions(a: int, b: int) -> int:
    text = "".join(map(str, range(a, a + b + 1)))
    return sum(position for position, digit in enumerate(text, start=1) if digit == "7")
