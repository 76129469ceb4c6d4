# SPDX-License-Identifier: Apache-2.0
"""How often greedy texts with speculation part from those without, and how close the two best logits are there.

Verification adds the same numbers in another order than token-by-token decoding. Where the two best logits nearly tie
that may turn a text, the more often the more the dtype rounds on the way. What follows a text's first difference is not
compared. The beginnings are the demo's prompts with some sampled tokens each.

    python benchmarks/agreement.py --device cpu --dtype bfloat16 --deterministic
"""

from __future__ import annotations

import argparse

from trtllm_replayssm.cli import PROMPTS
from trtllm_replayssm.runtime import Engine, SamplingParams


def beginnings(checkpoint: str, device: str | None, count: int) -> list[list[int]]:
    """`count` different prompts of token ids."""
    engine = Engine(checkpoint, device=device, dtype="float32", deterministic=True)
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=seed, stop_tokens=()) for seed in range(count)]
    texts = engine.generate([PROMPTS[seed % len(PROMPTS)] for seed in range(count)], params)
    return [text.prompt + text.tokens for text in texts]


def margins(plain: Engine, texts, others) -> list[float]:
    """The distance of the two best logits at the first difference of each pair that differs, sorted."""
    found = []
    for text, other in zip(texts, others, strict=True):
        pairs = enumerate(zip(text.tokens, other.tokens, strict=True))
        if (at := next((index for index, (a, b) in pairs if a != b), None)) is not None:
            best = plain.logits(text.prompt + text.tokens[:at])[-1].topk(2).values.tolist()
            found.append(best[0] - best[1])
    return sorted(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="examples/tiny-nemotron-h", metavar="DIR")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--texts", type=int, default=40, metavar="N")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each text")
    options = parser.parse_args()

    prompts = beginnings(options.checkpoint, options.device, options.texts)
    params = SamplingParams(max_tokens=options.tokens, stop_tokens=())
    knobs = dict(device=options.device, dtype=options.dtype, deterministic=options.deterministic)
    plain = Engine(options.checkpoint, **knobs)
    texts = plain.generate(prompts, params)
    for drafter in ("mtp", "ngram"):
        engine = Engine(options.checkpoint, speculation=drafter, **knobs)
        found = margins(plain, texts, engine.generate(prompts, params))
        rate = engine.statistics()["acceptance"].tokens_per_step
        shown = " ".join(f"{margin:.4f}" for margin in found) or "-"
        print(f"{drafter}, {rate:.2f} tokens a step: {len(found)} of {options.texts} texts part; margins {shown}")


if __name__ == "__main__":
    main()
