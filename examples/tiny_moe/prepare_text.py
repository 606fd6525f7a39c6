"""Cut the text of the tiny model out of unpacked Debian 12 packages.

Fetch and unpack the packages into one folder, each under its own name:

    mkdir debs pkgs && cd debs
    apt-get download sqlite3-doc postgresql-doc-15 python3.11-doc python-django-doc \
        python-sqlalchemy-doc abs-guide bible-kjv-text dict-devil dict-jargon
    for deb in *.deb; do dpkg -x "$deb" "../pkgs/${deb%%_*}"; done

then `python prepare_text.py ../pkgs text` writes text/train.txt, text/calib.txt and text/eval.txt:
UTF-8 documents joined by "<|endoftext|>". A document is a page, a Bible chapter or a run of
dictionary entries; the hash of its name says which text it goes to.
"""

import gzip
import hashlib
import itertools
import random
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import click

END = "<|endoftext|>"
DOC = "usr/share/doc"

# package -> (folder of its pages, pattern of the paths in it that are left out)
PAGES = {
    "sqlite3-doc": (
        f"{DOC}/sqlite3",
        r"^(releaselog|syntax)/|matrix|copyright|chronology|requirements|keyword|crossref|doclist"
        r"|sitemap|changes|^toc|^news",
    ),
    "postgresql-doc-15": (f"{DOC}/postgresql-doc-15/html", r"index|biblio|legalnotice|errcodes"),
    "python3.11-doc": (
        f"{DOC}/python3.11/html",
        r"genindex|modindex|search|license|copyright|whatsnew/(index|changelog)|^contents",
    ),
    "python-django-doc": (
        f"{DOC}/python-django-doc/html",
        r"genindex|modindex|search|_modules|^contents|releases/(index|security)",
    ),
    "python-sqlalchemy-doc": (
        f"{DOC}/python-sqlalchemy-doc/html",
        r"genindex|modindex|search|_modules|copyright|changelog",
    ),
    "abs-guide": (
        f"{DOC}/abs-guide/html",
        r"contributed-scripts|copyright|credits|revisionhistory|mirror|xrefindex|^index|todolist",
    ),
}
DICTIONARIES = {
    "dict-devil": "usr/share/dictd/devil.dict.dz",
    "dict-jargon": "usr/share/dictd/jargon.dict.dz",
}

# A document that names one of these licences may quote a work under it, so it is left out.
OTHER_LICENCE = re.compile(
    r"\bGPL|\bGFDL|GNU (?:Lesser |Library |Affero )?(?:General|Free Doc)|Creative Commons"
    r"|Apache Licen[cs]e|Mozilla Public|\bCC-BY|Wikipedia"
)

EVAL_SHARE, CALIB_SHARE = 0.03, 0.05
EVAL_BYTES, CALIB_BYTES = 150_000, 250_000
HELD_OUT_CHARS = 4000  # of each held-out document its beginning, so that many documents fit
MAX_PRE_LINES = 12  # longer listings are left out: the text is to be prose
MIN_CHARS = 400


class PageText(HTMLParser):
    """Collect the readable text of one page: a paragraph a line, listings as they stand."""

    SKIP_TAGS = frozenset({"head", "script", "style", "svg", "nav", "footer", "button", "form"})
    # fmt: off
    # Classes and ids of menus, tables of contents and footers.
    SKIP_NAMES = frozenset({
        "contents", "docs-bottom-navigation", "docs-copyright", "docs-narrow-top-navigation",
        "docs-top-navigation-container", "fixed-sidebar", "footer", "ft", "hd", "headerlink",
        "link-container", "menu", "narrow-index-nav", "navfooter", "navheader", "nosearch",
        "related", "searchmenu", "sidebar", "sphinxsidebar", "tagline", "toc",
        "toctree-wrapper", "viewcode-link",
    })
    BLOCKS = frozenset({
        "blockquote", "br", "dd", "div", "dl", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
        "ol", "p", "pre", "section", "table", "tr", "ul",
    })
    # fmt: on

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.listing: list[str] | None = None
        self.skipped_tag = ""
        self.skip_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip_depth:
            self.skip_depth += tag == self.skipped_tag
            return
        names = {
            name
            for key, value in attrs
            if key in ("class", "id")
            for name in (value or "").lower().split()
        }
        if tag in self.SKIP_TAGS or names & self.SKIP_NAMES:
            self.skipped_tag, self.skip_depth = tag, 1
        elif tag == "pre":
            self.listing = []
        elif tag == "li":
            self.pieces.append("\n- ")
        elif tag in self.BLOCKS:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append("  ")

    def handle_endtag(self, tag: str) -> None:
        if self.skip_depth:
            self.skip_depth -= tag == self.skipped_tag
        elif tag == "pre" and self.listing is not None:
            listing = "".join(self.listing).strip("\n")
            self.listing = None
            if listing.count("\n") < MAX_PRE_LINES:
                self.pieces.append("\n\0" + listing.replace("\n", "\n\0") + "\n")
        elif tag in self.BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.skip_depth:
            return
        if self.listing is not None:
            self.listing.append(data)
        else:
            self.pieces.append(re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """Return the text; lines of listings, marked by a zero byte, keep their indentation."""
        lines = []
        for line in "".join(self.pieces).split("\n"):
            is_listing = line.startswith("\0")
            line = line.replace("\0", "").rstrip() if is_listing else " ".join(line.split())
            if line not in ("", "-") or is_listing:
                lines.append(line)
        return "\n".join(lines)


def pages(root: Path, left_out: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each HTML page under root whose relative path left_out misses."""
    for path in sorted(root.rglob("*.html")):
        name = path.relative_to(root).as_posix()
        if re.search(left_out, name) or path.is_symlink():
            continue
        raw = path.read_bytes()
        encoding = "iso-8859-1" if b"charset=iso-8859-1" in raw[:2000].lower() else "utf-8"
        page = PageText()
        page.feed(raw.decode(encoding, errors="replace"))
        page.close()
        yield name, page.text()


def bible_chapters(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each chapter, one verse a line without its number.

    The file is cut into LZW blocks, as `compress` writes them, that share one 3-byte header.
    """
    raw = path.read_bytes()
    num_blocks = int.from_bytes(raw[0x58:0x5C], "big")
    table = raw[0x5C : 0x5C + 4 * (num_blocks + 1)]
    ends = [int.from_bytes(table[i : i + 4], "big") for i in range(0, len(table), 4)]
    header = raw[ends[0] - 3 : ends[0]]
    text = b"".join(
        subprocess.run(
            ["gzip", "-dc"], input=header + raw[a:b], capture_output=True, check=True
        ).stdout
        for a, b in itertools.pairwise(ends)
    ).decode("ascii")
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\d?[A-Za-z]+\d+):\d+ (.*)", line):
            chapters.setdefault(match[1], []).append(match[2])
    for name, verses in chapters.items():
        yield name, "\n".join(verses)


def dictionary_runs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of runs of whole entries, about 3,000 characters each.

    An entry begins at the margin after an empty line; what stands before "A" is the preface.
    """
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    entries = [e.strip() for e in re.split(r"\n\s*\n(?=\S)", text) if not e.startswith("00-data")]
    run: list[str] = []
    for i, entry in enumerate(entries):
        run.append(entry)
        if sum(map(len, run)) > 3000 or i == len(entries) - 1:
            yield f"{path.name}-{i}", "\n\n".join(run)
            run = []


def documents(packages: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (source, name, text) of every document of every package."""
    for source, (folder, left_out) in PAGES.items():
        for name, text in pages(packages / source / folder, left_out):
            yield source, name, text
    for source, file in DICTIONARIES.items():
        for name, text in dictionary_runs(packages / source / file):
            yield source, name, text
    bible = packages / "bible-kjv-text" / "usr/lib/bible.data"
    for name, text in bible_chapters(bible):
        yield "bible-kjv-text", name, text


def split_of(source: str, name: str) -> str:
    """Return the text a document goes to: a fixed share of the hashes of source and name."""
    digest = hashlib.sha256(f"{source}/{name}".encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return (
        "eval" if share < EVAL_SHARE else "calib" if share < EVAL_SHARE + CALIB_SHARE else "train"
    )


def shingles(text: str) -> set[int]:
    """Return the hashes of one in four of the runs of 8 words, letters and digits only."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    runs = (" ".join(words[i : i + 8]).encode() for i in range(max(1, len(words) - 7)))
    hashes = (int.from_bytes(hashlib.blake2b(run, digest_size=8).digest(), "big") for run in runs)
    return {h for h in hashes if h % 4 == 0}


def take_in_turn(by_source: dict[str, list[str]], num_bytes: int) -> list[str]:
    """Return documents taken from each source in turn until num_bytes are full, then shuffled."""
    taken: list[str] = []
    size = 0
    queues = [list(texts) for texts in by_source.values()]
    while size < num_bytes and any(queues):
        for queue in queues:
            if queue and size < num_bytes:
                taken.append(queue.pop(0))
                size += len(taken[-1].encode())
    random.Random(0).shuffle(taken)
    return taken


def clean(text: str, split: str) -> str:
    """Normalize white space; of a held-out document keep the beginning, cut at a line end."""
    text = text.replace(END, "").replace("\xa0", " ")
    text = re.sub("[¶\u200b\xad\ufffd\ue000-\uf8ff]|This page last modified on .*", "", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if split != "train" and len(text) > HELD_OUT_CHARS:
        text = text[:HELD_OUT_CHARS].rsplit("\n", 1)[0]
    return text


@click.command()
@click.argument("packages", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(packages: Path, out: Path) -> None:
    """Write train.txt, calib.txt and eval.txt to OUT from the unpacked PACKAGES."""
    found: dict[str, list[tuple[str, str]]] = {"train": [], "calib": [], "eval": []}
    for source, name, text in documents(packages):
        split = split_of(source, name)
        text = clean(text, split)
        if len(text) >= MIN_CHARS and not OTHER_LICENCE.search(text):
            found[split].append((source, text))
    seen: set[int] = set()
    out.mkdir(parents=True, exist_ok=True)
    # Training documents come first, so a held-out copy of one is dropped, never the reverse.
    for split, near in (("train", 0.5), ("calib", 0.15), ("eval", 0.15)):
        random.Random(0).shuffle(found[split])
        kept: dict[str, list[str]] = {}
        for source, text in found[split]:
            own = shingles(text)
            if len(own & seen) <= near * len(own):
                kept.setdefault(source, []).append(text)
            seen |= own
        for source, texts in sorted(kept.items()):
            size = sum(len(t.encode()) for t in texts)
            click.echo(f"{split:6}{source:24}{len(texts):6} documents{size:10} bytes")
        limit = {"train": 10**12, "calib": CALIB_BYTES, "eval": EVAL_BYTES}[split]
        texts = take_in_turn(dict(sorted(kept.items())), limit)
        (out / f"{split}.txt").write_text(END.join(texts), encoding="utf-8")
        num = sum(len(t) for t in kept.values())
        click.echo(
            f"{split}: wrote {len(texts)} documents; {len(found[split]) - num} copies dropped"
        )


if __name__ == "__main__":
    main()
