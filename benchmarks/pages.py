"""The pages of the documentation show the tables of `docs/results` as they are.

A table stands below a comment that names its file:

    <!-- results/errors.md -->

    | ... |

`python -m benchmarks.pages` fills in all of them.
"""

import re

from benchmarks.report import RESULTS, ROOT
from capsules.files.outputs import whole_file

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"(<!-- results/([\w.-]+\.md) -->)\n+((?:\|.*\n)*)\n*")
"""The comment, the name of the file, and the table, if there is one."""


def filled(text: str) -> str:
    """A page with the present tables below their comments."""

    def place_with_table(place: re.Match[str]) -> str:
        return f"{place[1]}\n\n{(RESULTS / place[2]).read_text()}\n"

    return PLACE.sub(place_with_table, text).rstrip("\n") + "\n"


def fill_pages() -> None:
    """Write every page whose tables have changed."""
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            with whole_file(page) as file:
                file.write(new.encode())
            print(f"{page.relative_to(ROOT)} has new tables.")


if __name__ == "__main__":
    fill_pages()
