"""Generated parts of documentation pages: the lines between `<!-- NAME begins -->` and `<!-- NAME ends -->`."""

from pathlib import Path


def replaced(text: str, name: str, body: str) -> str:
    """`text` with `body` as the part called `name`. Throws ValueError where the text has no such part."""
    begin, end = f"<!-- {name} begins -->\n", f"<!-- {name} ends -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no line {begin.strip()} followed by {end}")
    return f"{before}{begin}{body}\n{end}{after}"


def add_arguments(parser) -> None:
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the result into the page's generated part")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="exit 1 where that part is not current")


def publish(arguments, name: str, body: str, command: str) -> int:
    """Prints `body`, or writes or checks the page as the arguments say; `command` brings the page up to date."""
    page = arguments.write or arguments.check
    if page is None:
        print(body)
        return 0
    old = page.read_text()
    new = replaced(old, name, body)
    if arguments.write:
        page.write_text(new)
    elif old != new:
        print(f"{page}: the part {name} is not current -> {command}")
        return 1
    return 0
