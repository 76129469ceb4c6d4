# SPDX-License-Identifier: Apache-2.0
"""Prompts in the language of the shipped checkpoint."""

PROMPTS = [
    "In the beginning God created the heaven and the earth.",
    "And it came to pass",
    "The LORD is my shepherd;",
    "Blessed are the",
    "And the LORD said unto Moses,",
    "Now these are the names of the children of Israel,",
    "Thou shalt not",
    "For God so loved the world,",
    "And David said",
    "The words of the Preacher, the son of David,",
    "Hear, O Israel:",
    "In those days",
    "And Jesus answered and said unto them,",
    "Behold, I",
    "And the king of Assyria",
    "The wise man",
    "Praise ye the LORD.",
    "And Abraham rose up early in the morning, and saddled his ass, and took two of his young men with him,",
    "Woe unto",
    "So",
]
