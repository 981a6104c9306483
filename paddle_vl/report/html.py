"""What the pages of this package share: a frame that opens without a network, pictures, tables."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

from PIL import Image


def document(title: str, style: str, body: str, *, scripts: str = "", asks: str = "") -> str:
    """A page that refers to no other file.

    Args:
        scripts: script elements at its end; without them no script runs.
        asks: whom it may ask for data, as of `connect-src`; nobody by default.
    """
    allowed = "; script-src 'unsafe-inline'" * bool(scripts) + f"; connect-src {asks}" * bool(asks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:; media-src data:{allowed}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}{scripts}</body>
</html>
"""


def address(data: bytes, kind: str) -> str:
    """The address of data that lie in the page."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(image: Image.Image, form: str = "png") -> str:
    """An image that lies in the page."""
    data = io.BytesIO()
    image.save(data, format=form, quality=85)
    return f'<img alt="" src="{address(data.getvalue(), f"image/{form}")}">'


def table(rows: Iterable[tuple[str, Sequence[str]]], head: Sequence[str] = ()) -> str:
    """Rows of a label, as text, and cells, as HTML, like those of the head."""
    above = "".join(f"<th scope='col'>{cell}</th>" for cell in head)
    above = f"<thead><tr><td></td>{above}</tr></thead>\n" if head else ""
    body = "".join(
        f"<tr><th scope='row'>{escape(label)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}"
        "</tr>\n"
        for label, cells in rows
    )
    return f"<div class='scroll'><table>{above}<tbody>{body}</tbody></table></div>"


def fold(title: str, content: str, *, is_open: bool = True) -> str:
    """A part of a page that folds."""
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(title)}</summary>{content}</details>\n"
