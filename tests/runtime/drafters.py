# SPDX-License-Identifier: Apache-2.0
"""Drafters that know the text, so that what is accepted is known too."""

from trtllm_replayssm.runtime import Drafter

VOCAB = 1024


class Scripted(Drafter):
    """Proposes the next tokens of a known text: the first `right` of them as they are, the others changed.

    texts: prompt -> tokens. Each list of drafts may have its own `right`: an int, or a function of the sequence.
    """

    def __init__(self, texts, right):
        self.texts = {tuple(text.prompt): list(text.tokens) for text in texts}
        self.right = right if callable(right) else lambda sequence: right

    def propose(self, sequence, count):
        done, right = len(sequence.tokens), self.right(sequence)
        text = self.texts[tuple(sequence.prompt)][done : done + count]
        return [token if index < right else (token + 1) % VOCAB for index, token in enumerate(text)]
