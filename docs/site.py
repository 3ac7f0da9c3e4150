"""What the site takes from outside of this folder: the README, the changes and the notebooks."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


@event_priority(100)  # before the plugin that renders notebooks looks for them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = (ROOT / "README.md").read_text()
    pages = {"index.md": _from_here(readme), "changelog.md": (ROOT / "CHANGELOG.md").read_text()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    notebooks = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for name in [*notebooks, "LICENSE"]:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def _from_here(text: str) -> str:
    """Links of a page at the root of the project as links of one in this folder."""
    text = text.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\]\(notebooks\)", "](notebooks/1_the_model.ipynb)", text)
