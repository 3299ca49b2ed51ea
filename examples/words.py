"""The text that the demo trains on, and its words as tokens: a model of words writes readable lines sooner than one of
bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

TEXT = """\
A model is a long list of numbers, and a computer adds the numbers up. It adds two numbers and rounds the sum, then it
adds the next number and rounds the sum again. The order of the numbers is the order of the rounding, so another order
is another sum. The two sums are close, but the last bits of the two sums are not the same.

One computer is too small for a large model, so the model is cut into parts. Each computer holds one part of the model
and adds up the numbers of its part. Then the computers add up their sums, and the sum of the sums is the sum of all the
numbers. But two computers add in one order and four computers add in another order. So the model of two computers is
close to the model of four computers, but it is not the same model.

At first nobody sees the last bit. The loss of the first step is the same in six digits. Then the optimizer takes a
step, and the last bits of the loss are in the numbers of the model. At the next step the model reads the next words,
and the last bits of the model are in the loss again. After ten steps every number of the model has another last bit.
After a hundred steps the model has another answer to the same question.

Now a loss goes up, and an engineer asks for the reason. The old run was cut into two parts and the new run was cut into
four parts. Is the reason a bug in the new code, or is the reason the order of the numbers? The engineer compares the
two runs, but all the numbers of the two runs are different, so the engineer cannot see the bug.

A model plays a game and learns from the game. One computer plays and eight computers learn. The computer that plays
says that a word is likely, and the computers that learn say that the word is not so likely. The model is the same, but
the order of the numbers is not the same, so the model learns from the order of the numbers and not from the game.

There are two rules. The first rule is that the computers send numbers and never add the numbers that they send. The
second rule is that the computer that adds a sum holds all the numbers of the sum and adds them in one order. With the
two rules the order is the same on one computer and on eight computers. So the sum is the same sum, the last bit is the
same bit, and the model is the same model. Now a loss that goes up is a bug, and the engineer can see the bug.
"""
PROMPT = "The model"

_WORD = re.compile(r"\w+|[.,?]")
WORDS = tuple(sorted(set(_WORD.findall(TEXT))))  # a token is a word's place in it; fewer than the model's vocabulary


def encode(text: str) -> list[int]:
    return [WORDS.index(word) for word in _WORD.findall(text)]


def decode(tokens: Iterable[int]) -> list[str]:
    """A token that is no word of the text, which only a model that has learnt little writes, is shown as its number."""
    return [WORDS[token] if token < len(WORDS) else f"<{token}>" for token in tokens]


def join(words: Iterable[str]) -> str:
    return re.sub(r" (?=[.,?])", "", " ".join(words))
