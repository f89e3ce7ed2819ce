"""Building blocks of reports and pictures: HTML, SVG, sparklines."""
