"""A picture in SVG, written as text: rectangles, lines, labels, numbered marks."""

from xml.sax.saxutils import escape

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, FAINT = "#222222", "#d0d0d0"


class Picture:
    """Shapes in the order in which they are drawn; coordinates in pixels from the upper left.

    The same calls give the same bytes.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11" role="img">',
            f"<title>{escape(title)}</title>",
            # Viewers with a dark page would show it through.
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def stripes(self, name: str, colour: str, background: str) -> str:
        """Define a fill of slanted stripes; returns what `rect` takes for it."""
        self._lines.append(
            f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{background}"/>'
            f'<rect width="3" height="6" fill="{colour}"/></pattern></defs>'
        )
        return f"url(#{name})"

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle; one that is too narrow to be seen gets half a pixel."""
        self._lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'fill="{fill}"/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, dash: str = "none"
    ) -> None:
        """A line of one pixel."""
        self._lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-dasharray="{dash}"/>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal"
    ) -> None:
        """Words whose baseline is at ``y``; ``anchor``: start, middle or end."""
        self._lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{INK}">{escape(words)}</text>'
        )

    def mark(self, x: float, y: float, number: int) -> None:
        """A number in a circle around a point."""
        self._lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7.5" fill="{INK}" stroke="#ffffff"/>'
            f'<text x="{x:.1f}" y="{y + 3.7:.1f}" text-anchor="middle" font-weight="bold" '
            f'font-size="10" fill="#ffffff">{number}</text>'
        )

    def as_text(self) -> str:
        """The file."""
        return "\n".join([*self._lines, "</svg>", ""])
