#!/usr/bin/env python3
"""Builds a corpus of real Italian prose from Debian's documentation packages.

    italian_corpus.py --out build/corpus/italian.jsonl

The packages are downloaded with `apt-get download` and read in place: nothing is installed and no root is
needed. HTML and roff become plain text, one JSON line {"text", "source"} for each page, section or saying.

Paragraphs that are not Italian (untranslated parts, listings) are dropped. So is every longer paragraph that
was already seen: manuals repeat whole passages, and one repeated on both sides of a train/validation split
would make the validation loss a memory test. The same packages always give the same bytes.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

from errors import DataToolError

# A paragraph at least this long may occur once in the corpus; shorter ones (headings, menu paths) may repeat.
UNIQUE_PARAGRAPH_CHARS = 60
MIN_DOCUMENT_CHARS = 80
# Long pages are cut at paragraph ends, so that a split by document can be fine-grained.
MAX_DOCUMENT_CHARS = 12000

ITALIAN_WORDS = frozenset(
    "il lo la i gli le un uno una di a da in con su per tra fra del dello della dei degli delle al allo alla ai agli "
    "alle dal dalla dai dalle nel nella nei nelle sul sulla sui sulle e ed o che chi non si è sono come questo questa "
    "questi queste più anche può essere viene se ma ha hanno quando dove cui ogni quale tutti tutto dopo prima così "
    "l un dell all nell dall sull c mi ti ci ne io tu lui lei suo sua ho hai era cosa".split()
)
ENGLISH_WORDS = frozenset(
    "the of and to is that it for on with as are this be by from at or an which you can not have has was were will "
    "if when your its their there these those all use used using other than then also may should but do does so".split()
)
WORD = re.compile(r"[^\W\d_]+", re.UNICODE)


def is_italian(paragraph: str) -> bool:
    """Decides by function words; a paragraph with too few of either is a heading or a menu path and is kept."""
    words = [word.lower() for word in WORD.findall(paragraph)]
    italian = sum(word in ITALIAN_WORDS for word in words)
    english = sum(word in ENGLISH_WORDS for word in words)
    if len(words) < 8:
        return english <= italian
    return italian > 2 * english and italian * 12 >= len(words)


class HtmlText(html.parser.HTMLParser):
    """DocBook's XHTML as paragraphs. Navigation, tables of contents, listings and images leave no text."""

    BLOCKS = frozenset("p div li dt dd td th tr table h1 h2 h3 h4 h5 h6 br hr ul ol dl blockquote body".split())
    VOID = frozenset("br hr img meta link input col".split())
    SKIPPED_TAGS = frozenset("head header footer nav aside script style pre".split())
    SKIPPED_CLASSES = frozenset(
        "navheader navfooter docnav toc list-of-figures list-of-tables list-of-examples reportbug footnotes index "
        "indexdiv bibliography revhistory legalnotice MAC bascode".split()
    )

    def __init__(self, section_heading: str | None = None):
        super().__init__(convert_charrefs=True)
        self.section_heading = section_heading
        self.sections: list[list[str]] = [[]]
        self._pending: list[str] = []
        self._open: list[str] = []
        self._skip_from: int | None = None  # depth of the outermost element being skipped

    def handle_startendtag(self, tag, attrs):
        if tag in self.BLOCKS:
            self._flush()

    def handle_starttag(self, tag, attrs):
        if tag in self.VOID:
            if tag in self.BLOCKS:
                self._flush()
            return
        self._open.append(tag)
        if self._skip_from is None:
            attributes = dict(attrs)
            classes = (attributes.get("class") or "").split()
            if (
                tag in self.SKIPPED_TAGS
                or self.SKIPPED_CLASSES.intersection(classes)
                or attributes.get("id") in ("banner", "title")
            ):
                self._skip_from = len(self._open)
        if tag in self.BLOCKS:
            self._flush()
        if tag == self.section_heading and self._skip_from is None:
            self.sections.append([])

    def handle_endtag(self, tag):
        if tag in self.BLOCKS:
            self._flush()
        if tag not in self._open:
            return
        while self._open.pop() != tag:
            pass
        if self._skip_from is not None and len(self._open) < self._skip_from:
            self._skip_from = None

    def handle_data(self, data):
        if self._skip_from is None:
            self._pending.append(data)

    def _flush(self):
        text = " ".join("".join(self._pending).split())
        self._pending.clear()
        if text:
            self.sections[-1].append(text)

    def close(self):
        super().close()
        self._flush()


def html_sections(data: bytes, section_heading: str | None = None) -> Iterator[list[str]]:
    parser = HtmlText(section_heading)
    parser.feed(data.decode("utf-8"))
    parser.close()
    yield from parser.sections


# roff escapes that stand for a character
ROFF_CHARACTERS = {
    "em": "—", "en": "–", "hy": "-", "bu": "•", "co": "©", "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "aq": "'",
    "dq": '"', "Fo": "«", "Fc": "»", "`E": "È", "`a": "à", "`e": "è", "'e": "é", "`i": "ì", "`o": "ò", "`u": "ù",
    "->": "→", "ti": "~", "ha": "^", "rs": "\\", "mu": "×", "ga": "`",
}  # fmt: skip
ROFF_STRINGS = {
    'L"': "“",
    'R"': "”",
    "--": "—",
    "lq": "“",
    "rq": "”",
    "Aq": "'",
    "C`": "",
    "C'": "",
    "R": "®",
    "Tm": "™",
}
ROFF_SPACES = frozenset(" ~0")
ROFF_NOTHING = frozenset("&|^,/:%)c")
ROFF_ESCAPE = re.compile(
    r"""\\(?:
        ".*$                                                # comment
      | f(?:\[[^\]]*\]|\(..|.) | s[-+]?\d{1,2} | [hvw]'[^']*' # font, size, motion
      | \((?P<pair>..) | \[(?P<name>[^\]]+)\]               # special character
      | \*(?:\((?P<string_pair>..)|\[(?P<string_name>[^\]]+)\]|(?P<string>.))
      | (?P<single>.) | $
    )""",
    re.VERBOSE,
)


def roff_escape(match: re.Match) -> str:
    if single := match["single"]:
        if single in ROFF_SPACES:
            return " "
        return "" if single in ROFF_NOTHING else "\\" if single == "e" else single
    if special := match["pair"] or match["name"]:
        return ROFF_CHARACTERS.get(special, "")
    return ROFF_STRINGS.get(match["string_pair"] or match["string_name"] or match["string"], "")


def roff_inline(text: str) -> str:
    """Text of a roff line: fonts, sizes and motions vanish, special characters become themselves."""
    return " ".join(ROFF_ESCAPE.sub(roff_escape, text).split())


ROFF_FONTS = frozenset("B I R BR RB BI IB IR RI SM SB".split())
ROFF_PARAGRAPHS = frozenset("PP P LP TP IP HP TQ RS RE sp br Sp Pp It".split())
ROFF_MACRO_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"|(\S+)')


def roff_sections(data: bytes) -> Iterator[list[str]]:
    """A manual page's sections, from the man macros that these pages use. Unfilled text (listings) is dropped."""
    try:
        source = data.decode("utf-8")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    section: list[str] = []
    words: list[str] = []
    unfilled = False
    definition_end: str | None = None

    def flush():
        if words:
            section.append(" ".join(words))
            words.clear()

    for line in source.splitlines():
        if definition_end is not None:
            if line.startswith(definition_end):
                definition_end = None
            continue
        if line[:1] not in (".", "'"):
            if unfilled:
                continue
            if not line.strip():
                flush()
            elif text := roff_inline(line):
                words.append(text)
            continue
        match = re.match(r"[.']\s*(\S*)\s*(.*)$", line)
        macro, rest = match.group(1), match.group(2)
        if macro.startswith('\\"'):
            continue
        arguments = [
            quoted.replace('""', '"') if quoted else bare for quoted, bare in ROFF_MACRO_ARGUMENT.findall(rest)
        ]
        if macro in ("de", "ig", "am"):
            definition_end = ".."
        elif macro in ("TS", "EQ"):
            definition_end = ".TE" if macro == "TS" else ".EN"
        elif macro in ("nf", "EX", "Vb"):
            flush()
            unfilled = True
        elif macro in ("fi", "EE", "Ve"):
            unfilled = False
        elif macro in ("SH", "SS"):
            flush()
            unfilled = False
            if macro == "SH":
                yield section
                section = []
            section.append(roff_inline(" ".join(arguments)))
        elif macro in ROFF_PARAGRAPHS:
            flush()
            if macro == "IP" and arguments and (text := roff_inline(arguments[0])) not in ("", "•", "*", "-"):
                words.append(text)
        elif macro in ROFF_FONTS and arguments and not unfilled:
            joint = "" if len(macro) == 2 and macro not in ("SM", "SB") else " "
            words.append(roff_inline(joint.join(arguments)))
    flush()
    yield section


def fortune_sections(data: bytes) -> Iterator[list[str]]:
    """Sayings are separated by lines holding a single %; their own line breaks are part of them."""
    try:
        source = data.decode("utf-8")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    for saying in re.split(r"(?m)^%\s*$", source.replace("\r\n", "\n")):
        lines = [" ".join(line.split()) for line in saying.expandtabs().strip().splitlines()]
        yield ["\n".join(lines)]


class Source(NamedTuple):
    package: str
    pattern: str  # of the member's path inside the package
    sections: Callable[[bytes], Iterator[list[str]]]


SOURCES = (
    Source("debian-handbook", r"/html/it-IT/(?!index)[^/]+\.html$", html_sections),
    Source("debian-reference-it", r"/(ch|ap|pr)\w+\.it\.html$", lambda data: html_sections(data, "h2")),
    Source("gimp-help-it", r"/help/it/(?!index|bibliography|glossary-index)[^/]+\.html$", html_sections),
    Source("libreoffice-help-it", r"/help/it/text/(?!sbasic/shared/0[0-3]/main)[^.]+\.html$", html_sections),
    Source("aptitude-doc-it", r"/html/it/(?!index)[^/]+\.html$", html_sections),
    Source("debian-faq-it", r"/FAQ/it/(?!index)[^/]+\.it\.html$", lambda data: html_sections(data, "h2")),
    Source("maint-guide-it", r"/html/(?!index)[^/]+\.it\.html$", lambda data: html_sections(data, "h2")),
    Source("debian-edu-doc-it", r"/debian-edu-bookworm-manual\.html$", lambda data: html_sections(data, "h2")),
    Source("manpages-it", r"/man/it/man\d/[^/]+\.gz$", lambda data: roff_sections(gzip.decompress(data))),
    Source("fortunes-it", r"/fortunes/it/(?!banner)[a-z]+$", fortune_sections),
)


def download(packages: list[str], folder: pathlib.Path) -> None:
    """Fetches what is missing; apt checks the archives against the signed package lists."""
    missing = [package for package in packages if not list(folder.glob(f"{package}_*.deb"))]
    if not missing:
        return
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise DataToolError(
                f"{program} not found; the Italian corpus comes from Debian packages"
                " -> run this on Debian, or prepare a text of your own with prepare.py"
            )
    folder.mkdir(parents=True, exist_ok=True)
    # The sandbox user of apt cannot write to a private folder; as the same user there is nothing to drop to.
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *missing]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0 and os.geteuid() == 0:
        print("apt has no current package lists: apt-get update", flush=True)
        subprocess.run(["apt-get", "-q", "update"], stdout=subprocess.DEVNULL, check=False)
        result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise DataToolError(
            f"`{' '.join(command)}` failed:\n{result.stdout.strip()}\n"
            f"-> run `apt-get update` as root and try again, or put the packages into {folder}"
        )


def package_members(archive: pathlib.Path, pattern: str) -> list[tuple[str, bytes]]:
    """Regular files of a package whose path matches, sorted by path. Nothing is unpacked to disk."""
    wanted = re.compile(pattern)
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg() and wanted.search(m.name)]
    if process.returncode != 0:
        raise DataToolError(f"{archive}: dpkg-deb could not read it -> delete the file and run again")
    if not members:
        raise DataToolError(
            f"{archive}: no member matches {pattern}; the package changed its layout"
            " -> adapt SOURCES in italian_corpus.py"
        )
    return sorted(members)


def pieces(paragraphs: list[str]) -> Iterator[list[str]]:
    """Cuts a long page into documents of at most MAX_DOCUMENT_CHARS at paragraph ends."""
    piece: list[str] = []
    length = 0
    for paragraph in paragraphs:
        if piece and length + len(paragraph) > MAX_DOCUMENT_CHARS:
            yield piece
            piece, length = [], 0
        piece.append(paragraph)
        length += len(paragraph) + 2
    yield piece


def build(debs: pathlib.Path) -> Iterator[dict]:
    """Yields the documents {"text", "source"} in a fixed order."""
    seen: set[bytes] = set()

    def is_new(paragraph: str) -> bool:
        if len(paragraph) < UNIQUE_PARAGRAPH_CHARS:
            return True
        key = hashlib.blake2b(" ".join(paragraph.lower().split()).encode(), digest_size=16).digest()
        return not (key in seen or seen.add(key))

    for source in SOURCES:
        archive = max(debs.glob(f"{source.package}_*.deb"), key=lambda path: path.stat().st_mtime)
        documents = characters = 0
        for name, data in package_members(archive, source.pattern):
            for section in source.sections(data):
                kept = [p for p in section if is_italian(p) and is_new(p)]
                for piece in pieces(kept):
                    text = "\n\n".join(piece)
                    if len(text) >= MIN_DOCUMENT_CHARS:
                        documents += 1
                        characters += len(text.encode())
                        yield {"text": text, "source": f"{source.package}/{pathlib.PurePosixPath(name).name}"}
        print(f"{archive.name}: {documents:,} documents, {characters / 1e6:.2f} MB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines file to write")
    parser.add_argument("--packages", type=pathlib.Path, help="folder for the .deb files (default: debs/ beside --out)")
    arguments = parser.parse_args()
    debs = arguments.packages or arguments.out.parent / "debs"
    try:
        download([source.package for source in SOURCES], debs)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        partial = arguments.out.with_name(arguments.out.name + ".partial")
        digest = hashlib.sha256()
        count = size = 0
        with open(partial, "wb") as file:
            for document in build(debs):
                line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
                count += 1
                size += len(document["text"].encode())
        os.replace(partial, arguments.out)
    except DataToolError as error:
        print(f"italian_corpus.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{arguments.out}: {count:,} documents, {size / 1e6:.2f} MB of text, sha256 {digest.hexdigest()[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
