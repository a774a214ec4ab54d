"""The corpus builder's parts, on text of the kinds that the packages hold. No download."""

import subprocess

import italian_corpus
import pytest
from errors import DataToolError

PAGE = """<?xml version="1.0"?><html><head><title>Titolo</title><style>p {}</style></head><body>
<div class="navheader"><table><tr><th>Avanti e indietro</th></tr></table></div>
<div class="section"><h2 class="title"><a id="x"/>9.3. Gestione &amp; permessi</h2>
<p>Ogni file ha <em>permessi</em> specifici&nbsp;per
   tre categorie.<br/>Seconda riga</p><pre class="screen">ls -l</pre>
<ul><li><p>uno</p></li><li>due<span class="MAC">Cmd</span></li></ul><h2>Altro</h2><p>testo</p></div>
<div class="navfooter">Pagina successiva</div></body></html>"""

MANUAL = r""".\" a comment
.de Vb
.ft CW
..
.TH PROVA 1
.SH NOME
prova \- un programma di \fBesempio\fP
.SH DESCRIZIONE
Il comando
.BR prova (1)
legge il \(Fofile\(Fc.
.PP
Secondo paragrafo, con una barra rovesciata \\ e un\(aqapostrofo.
.nf
codice che non e' prosa
.fi
.TP
.B \-a
mostra tutto
"""


def test_html_becomes_paragraphs_without_navigation_listings_or_hidden_parts():
    (paragraphs,) = italian_corpus.html_sections(PAGE.encode())
    assert paragraphs == [
        "9.3. Gestione & permessi", "Ogni file ha permessi specifici per tre categorie.", "Seconda riga",
        "uno", "due", "Altro", "testo",
    ]  # fmt: skip
    sections = list(italian_corpus.html_sections(PAGE.encode(), "h2"))
    assert [section[0] for section in sections[1:]] == ["9.3. Gestione & permessi", "Altro"]


def test_roff_becomes_sections_of_plain_text():
    sections = [section for section in italian_corpus.roff_sections(MANUAL.encode()) if section]
    assert sections == [
        ["NOME", "prova - un programma di esempio"],
        [
            "DESCRIZIONE", "Il comando prova(1) legge il «file».",
            "Secondo paragrafo, con una barra rovesciata \\ e un'apostrofo.", "-a mostra tutto",
        ],
    ]  # fmt: skip


def test_sayings_keep_their_lines():
    sayings = list(
        italian_corpus.fortune_sections("Prima riga\n\t\t-- Autore\n%\nSeconda  massima\n%\n".encode("utf-8"))
    )
    assert sayings[:2] == [["Prima riga\n-- Autore"], ["Seconda massima"]]


def test_language_is_told_by_function_words():
    assert italian_corpus.is_italian("Il comando legge il file e lo scrive nella cartella che è stata indicata.")
    assert italian_corpus.is_italian("9.3. Gestione dei permessi")
    assert not italian_corpus.is_italian("If a file has ACLs set, the output of the command will show a plus-sign.")
    assert not italian_corpus.is_italian("drwxr-xr-x root root Makefile usr share doc bin lib var tmp home opt")


def make_package(folder, name, files):
    """A Debian package with nothing but data."""
    root = folder / f"{name}-root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@localhost>\nDescription: test\n"
    )
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(root), str(folder / f"{name}_1_all.deb")],
        check=True,
        capture_output=True,
    )


def test_a_passage_of_two_packages_is_kept_once_and_the_result_is_the_same_twice(tmp_path, monkeypatch):
    passage = "Questo paragrafo si trova in due pacchetti, e deve restare una volta sola nel corpus finale."
    own = "Questa frase, invece, si trova soltanto nella pagina numero {} del manuale di prova."
    page = "<html><body><p>{}</p><p>" + own + "</p></body></html>"
    for name in ("uno", "due"):
        files = {f"usr/share/{name}/{n}.html": page.format(passage, f"{n} {name}").encode() for n in (2, 1)}
        make_package(tmp_path, name, files)
    sources = [italian_corpus.Source(name, r"\.html$", italian_corpus.html_sections) for name in ("uno", "due")]
    monkeypatch.setattr(italian_corpus, "SOURCES", sources)
    first, second = (list(italian_corpus.build(tmp_path)) for _ in range(2))
    assert first == second
    assert [document["source"] for document in first] == ["uno/1.html", "uno/2.html", "due/1.html", "due/2.html"]
    assert sum(document["text"].count(passage) for document in first) == 1
    with pytest.raises(DataToolError, match="no member matches"):
        italian_corpus.package_members(tmp_path / "uno_1_all.deb", r"\.txt$")
