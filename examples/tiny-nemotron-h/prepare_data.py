"""Extract the King James Bible to plain text and train the tokenizer on it.

The text comes from the Debian packages `bible-kjv` (the reader) and `bible-kjv-text` (its compressed text):

    apt-get install bible-kjv
    python prepare_data.py

writes `.data/kjv.txt` (git-ignored) and, with `--tokenizer`, `tokenizer.json` beside this script. One chapter is one
document: a heading line ("Genesis 1"), then one verse a line; an empty line separates chapters.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA_FILE = HERE / ".data" / "kjv.txt"

# Text digest of the packages' version 4.38. Another edition trains as well, but its losses are not comparable.
KJV_SHA256 = "c7e7725a09591bcff7a3728259ded9c95b9b07fd6072fdf880b214823a7d7726"

VOCAB_SIZE = 1024
PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2, as in config.json

HOLD_OUT_EVERY = 20  # chapters; whole chapters, so that no verse of a held-out passage is seen in training

# The reader's abbreviations, in canonical order, and the headings used here.
BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalm", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians", "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "1Th": "1 Thessalonians", "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus",
    "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John",
    "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip

VERSE = re.compile(r"(?P<book>\d?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<text>.*)")


def extract_chapters() -> list[str]:
    """Read the whole text through the `bible` program and return its 1189 chapters, headings included."""
    # -f switches pretty-printing off: one verse a line, each behind its reference.
    lines = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    chapters: list[list[str]] = []
    current = None
    for line in lines:
        match = VERSE.fullmatch(line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        heading = f"{BOOKS[match['book']]} {match['chapter']}"
        if heading != current:
            chapters.append([heading])
            current = heading
        chapters[-1].append(" ".join(match["text"].split()))
    return ["\n".join(chapter) for chapter in chapters]


def load_chapters(path: Path = DATA_FILE) -> tuple[list[str], str]:
    """Return the chapters of a text file that this script wrote, and the file's SHA-256."""
    content = path.read_bytes()
    return content.decode().rstrip("\n").split("\n\n"), hashlib.sha256(content).hexdigest()


def split_chapters(chapters: list[str]) -> dict[str, list[str]]:
    """Split into `train`, `validation` (chooses the checkpoint) and `test` (only reported), by whole chapters."""
    roles = {HOLD_OUT_EVERY // 2 - 1: "test", HOLD_OUT_EVERY - 1: "validation"}
    split: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for index, chapter in enumerate(chapters):
        split[roles.get(index % HOLD_OUT_EVERY, "train")].append(chapter)
    return split


def train_tokenizer(texts: list[str], path: Path) -> None:
    """Train a byte-level BPE of VOCAB_SIZE entries on `texts`; it prepends BOS to what it encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    write_atomically(path, tokenizer.to_str(pretty=True).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or leave the old one: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="store_true", help="also train tokenizer.json on the training split")
    args = parser.parse_args()

    DATA_FILE.parent.mkdir(exist_ok=True)
    write_atomically(DATA_FILE, ("\n\n".join(extract_chapters()) + "\n").encode())
    chapters, digest = load_chapters()
    print(f"{DATA_FILE.relative_to(HERE)}: {len(chapters)} chapters, {DATA_FILE.stat().st_size} bytes, sha256 {digest}")
    if digest != KJV_SHA256:
        print(f"note: this differs from the text that the shipped checkpoint was trained on ({KJV_SHA256})")
    if args.tokenizer:
        train_tokenizer(split_chapters(chapters)["train"], HERE / "tokenizer.json")


if __name__ == "__main__":
    main()
