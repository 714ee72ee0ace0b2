"""What mkdocs does besides the usual: files outside docs/ to which a page links are in the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def outside(source: str, target: str) -> str | None:
    """The path below the repository of a link that leaves docs/, else None."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
    return None if path.startswith("docs/") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file to which a page links outside docs/, under its path in the repository."""
    for page in files.documentation_pages():
        for target in LINK.findall(page.content_string):
            path = outside(page.src_uri, target)
            if path and not files.get_file_from_path(in_site(path)) and (ROOT / path).is_file():
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, in_site(path), content=content))
    return files


def in_site(path: str) -> str:
    """Where a file lies in the site. Markdown keeps its text: its own links may lead anywhere."""
    return path.replace("README.md", "README.txt").replace(".md", ".txt")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the files that `on_files` has added."""

    def moved(match: re.Match) -> str:
        path = outside(page.file.src_uri, match[1])
        if path is None:
            return match[1]
        return posixpath.relpath(in_site(path), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
